// A params struct from keyword arguments, for the Python module's bindings. The type of a field decides what its
// argument is: a number, or a tensor: any object with data_ptr(), stride(), element_size() and shape, as in torch. None
// leaves a null address. The bound object keeps its tensors alive; the caller checks their shapes.
#pragma once
#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "params.h"

namespace mtraining::field_bindings {

namespace py = pybind11;

inline py::object call(py::handle tensor, PyObject* method) {
  PyObject* const result = PyObject_CallMethodNoArgs(tensor.ptr(), method);
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

inline bool is_missing(py::handle tensor) { return tensor.ptr() == Py_None; }

inline uintptr_t address(py::handle tensor) {
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  return is_missing(tensor) ? 0 : py::cast<uintptr_t>(call(tensor, data_ptr));
}

template <typename Pointer>
Pointer pointer_to(py::handle tensor) {
  return reinterpret_cast<Pointer>(address(tensor));
}

// Counted in elements; all zero without a tensor.
class Strides {
 public:
  explicit Strides(py::handle tensor) {
    static PyObject* const stride = PyUnicode_InternFromString("stride");
    if (!is_missing(tensor)) strides_ = call(tensor, stride);
  }
  int64_t operator[](size_t dim) const {
    return strides_ ? py::cast<int64_t>(py::reinterpret_borrow<py::tuple>(strides_)[dim]) : 0;
  }

 private:
  py::object strides_;
};

// ---- the value of a field from its argument, by its type ------------------------------------------------------------
template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
void assign(Number& field, py::handle value) {
  field = py::cast<Number>(value);
}

template <typename Element>
void assign(Element*& field, py::handle tensor) {
  field = pointer_to<Element*>(tensor);
}

// [batch, seq, heads, head_dim].
inline void assign(Rows& field, py::handle tensor) {
  const Strides strides(tensor);
  field = {pointer_to<void*>(tensor), strides[0], strides[1], strides[2]};
}

// [batch, heads, seq].
inline void assign(RowScalars& field, py::handle tensor) {
  const Strides strides(tensor);
  field = {pointer_to<float*>(tensor), strides[0], strides[1]};
}

// [index rows, lists] or [index rows, lists, width].
inline void assign(Table& field, py::handle tensor) {
  const Strides strides(tensor);
  field = {pointer_to<const int32_t*>(tensor), strides[0], strides[1]};
}

// A tuple of starts [batch, lists, *], entries, and row masks or None.
inline void assign(BlockLists& field, py::handle tensors) {
  const auto [starts, entries, row_masks] = py::cast<std::tuple<py::object, py::object, py::object>>(tensors);
  field = {pointer_to<const int32_t*>(starts), pointer_to<const int32_t*>(entries),
           pointer_to<const uint64_t*>(row_masks), py::cast<int64_t>(starts.attr("shape")[py::int_(2)])};
}

// The fields of a struct by name.
template <typename Params>
class Fields {
 public:
  template <typename Field>
  void operator()(const char* name, Field Params::* field) {
    setters_[name] = [field](Params& params, py::handle value) { assign(params.*field, value); };
  }

  // [2, batch, seq, heads, head_dim]: of key, of value.
  void operator()(const char* name, Rows Params::* key, Rows Params::* value) { both(name, key, value, 2, 3); }

  // [2, index rows, lists, entries, head_dim]: of key, of value.
  void packed(const char* name, Rows Params::* key, Rows Params::* value) { both(name, key, value, 3, 2); }

  void set(Params& params, const py::kwargs& values) const {
    for (const auto& [key, value] : values) {
      const auto name = py::cast<std::string>(key);
      const auto found = setters_.find(name);
      if (found == setters_.end()) throw py::type_error("there is no field " + name);
      found->second(params, value);
    }
  }

 private:
  void both(const char* name, Rows Params::* key, Rows Params::* value, size_t seq_dim, size_t head_dim) {
    setters_[name] = [=](Params& params, py::handle tensor) {
      params.*key = params.*value = {};
      if (is_missing(tensor)) return;
      const Strides strides(tensor);
      auto* const first = pointer_to<uint8_t*>(tensor);
      const int64_t half_bytes = strides[0] * py::cast<int64_t>(tensor.attr("element_size")());
      params.*key = {first, strides[1], strides[seq_dim], strides[head_dim]};
      params.*value = {first + half_bytes, strides[1], strides[seq_dim], strides[head_dim]};
    };
  }

  std::unordered_map<std::string, std::function<void(Params&, py::handle)>> setters_;
};

// A params struct with the arguments that its addresses came from.
template <typename Params>
struct Held : Params {
  py::dict arguments;
};

// Binds the class `name`: constructed from fields, of which `set` changes some. The struct's bind_fields names them.
template <typename Params>
void bind(py::module_& module, const char* name) {
  auto named = std::make_shared<Fields<Params>>();
  bind_fields(*named, static_cast<const Params*>(nullptr));
  const auto set = [fields = std::shared_ptr<const Fields<Params>>(std::move(named))](Held<Params>& params,
                                                                                      const py::kwargs& values) {
    fields->set(params, values);
    if (PyDict_Update(params.arguments.ptr(), values.ptr())) throw py::error_already_set();
  };
  py::class_<Held<Params>>(module, name)
      .def(py::init([set](const py::kwargs& values) {
        auto params = std::make_unique<Held<Params>>();
        set(*params, values);
        return params;
      }))
      .def("set", set);
}

}  // namespace mtraining::field_bindings
