"""Replacement of a function of Megatron by another, and its undoing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .compat import require_symbol


def rebind(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Point every module attribute that is an old one at its new one: ``from module import name`` leaves many.

    Give new ones that no module here has a name for: they would be rebound themselves on the way back.

    Args:
        pairs: old and new.
    """
    new_of = {id(old): new for old, new in pairs}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in new_of:
                setattr(module, name, new_of[id(value)])


class Patches:
    """Wrappers around functions of Megatron: each is put on once, all are taken off together."""

    def __init__(self) -> None:
        self._undo: dict[str, Callable[[], None]] = {}

    def wrap(
        self, module_name: str, name: str, wrapper: Callable[..., Any], *, parameters: tuple[str, ...] = ()
    ) -> None:
        """Hand every call of ``module_name.name`` to ``wrapper(original, *args, **kwargs)``.

        Args:
            module_name: where the function is defined; it is replaced wherever else it is bound by name too.
            name: of the function. A second call with the same names changes nothing.
            wrapper: takes the original first.
            parameters: names that the function must take for the wrapper to be right.

        Raises:
            MissingSymbolError: this Megatron has no such function, or one without these parameters.
        """
        target = f"{module_name}.{name}"
        if target not in self._undo:
            original = require_symbol(module_name, name, parameters=parameters)
            wrapped = _wrapped(original, wrapper)
            rebind([(original, wrapped)])
            self._undo[target] = lambda: rebind([(wrapped, original)])

    def wrap_init(
        self, module_name: str, name: str, wrapper: Callable[..., Any], *, parameters: tuple[str, ...] = ()
    ) -> None:
        """Wrap the constructor of a class the same way: ``wrapper(original_init, self, *args, **kwargs)``."""
        require_symbol(module_name, name, parameters=parameters)
        self.wrap_method(module_name, name, "__init__", wrapper)

    def wrap_method(
        self,
        module_name: str,
        name: str,
        method: str,
        wrapper: Callable[..., Any],
        *,
        parameters: tuple[str, ...] = (),
    ) -> None:
        """Wrap a ``method`` of a class the same way: ``wrapper(original_method, self, *args, **kwargs)``."""
        target = f"{module_name}.{name}" if method == "__init__" else f"{module_name}.{name}.{method}"
        if target not in self._undo:
            original = require_symbol(module_name, f"{name}.{method}", parameters=parameters)
            cls = require_symbol(module_name, name)
            setattr(cls, method, _wrapped(original, wrapper))
            self._undo[target] = lambda: setattr(cls, method, original)

    def undo(self) -> None:
        """Put the originals back; do nothing where nothing is wrapped."""
        while self._undo:
            self._undo.popitem()[1]()

    def __len__(self) -> int:
        return len(self._undo)

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted names of the wrapped functions."""
        return tuple(self._undo)


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return call
