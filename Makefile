# Two commands matter: `make demo` and `make test`. Each prepares all that it needs; a second run starts at once.
#
#   VENV=.venv        the environment's folder; VENV=0 uses the current environment and keeps its torch (NGC containers)
#   PYTHON=...        the interpreter that the environment is made with, anew where it has another version; by default
#                     the environment that is there, else one is searched for
#   TORCH=...         what pip installs as torch, options included: TORCH="torch --index-url <your CPU index>"
#   MEGATRON_LM=...   folder of a Megatron-LM tree, for `make extend`;  EXTEND_VENV=... its environment's folder, 0 as above
#   TESTS=tests       what `make test` runs;  PYTEST_ARGS=..., DEMO_ARGS=... and SANITIZE_ARGS=... are handed on

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo extend test test-extended lint format docs kernels compile_commands sanitize wheels clean

VENV ?= .venv
PYTHON ?=
TESTS ?= tests
WORKERS ?= auto
RANKS ?= 4
EXTEND_VENV ?= .venv-extend
# Without a GPU there is nothing for the compiled kernels to run on, so the set-up leaves them out; with one, setup.py decides.
MTRAINING_CUDA ?= $(shell nvidia-smi >/dev/null 2>&1 || echo 0)

ifeq ($(VENV),0)
RUN := $(or $(PYTHON),python3)
READY := .mtraining-ready
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.mtraining-ready
# PYTHON asks for a version: an environment of another one is made anew.
version = $(shell $(1) -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null)
ifneq ($(PYTHON),)
ifneq ($(call version,$(PYTHON)),$(call version,$(RUN)))
.PHONY: $(READY)
endif
endif
endif

# One thread a process: ranks and test workers already fill the cores.
export OMP_NUM_THREADS ?= 1
# Containers often set it; every rank would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
SETUP_ENV := $(if $(MTRAINING_CUDA),MTRAINING_CUDA=$(MTRAINING_CUDA))

CUDA_SOURCES = $(wildcard csrc/*.cu csrc/*.cuh csrc/*.h csrc/*.cpp csrc/instantiations/*.cu)
CLANG_FORMAT = $(RUN) -c 'import clang_format; clang_format.clang_format()'

help:
	@echo "make demo     train a small GPT over four context-parallel ranks, under 3 minutes after the set-up"
	@echo "make extend   SmolLM2 to a longer context and back, MEGATRON_LM=path/to/Megatron-LM; under 15 minutes after the set-up"
	@echo "make test     run the tests, about 7 minutes on 2 cores"
	@echo "make test-extended  run the long tests that make test leaves out"
	@echo "make lint     ruff, check and format; mypy on the package; clang-format of csrc/"
	@echo "make format   write the format that make lint checks"
	@echo "make docs     build the documentation into site/, without warnings, links checked"
	@echo "make kernels  build the CUDA module with nvcc for sm_80 and sm_90a and print ptxas' report; needs no GPU"
	@echo "make compile_commands  write compile_commands.json for clangd; needs no nvcc"
	@echo "make sanitize run every kernel on small shapes under compute-sanitizer; needs a GPU"
	@echo "make wheels   build dist/: source, a wheel with the kernels for each Python found, one without; needs nvcc"
	@echo "make clean    remove the environment, builds and outputs"

demo: $(READY)
	[ $$(nvidia-smi -L 2>/dev/null | wc -l) -ge $(RANKS) ] || export CUDA_VISIBLE_DEVICES=; \
	$(RUN) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_tiny_gpt.py $(DEMO_ARGS)

extend:
	MEGATRON_LM="$(MEGATRON_LM)" VENV="$(EXTEND_VENV)" PYTHON="$(PYTHON)" TORCH="$(TORCH)" \
	    examples/extend_context/smollm2/run.sh $(EXTEND_ARGS)

test: $(READY)
	$(RUN) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST_ARGS) $(TESTS)

test-extended: $(READY)
	$(RUN) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal -m extended $(PYTEST_ARGS) $(TESTS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(CLANG_FORMAT) --dry-run --Werror $(CUDA_SOURCES)

format: $(READY)
	$(RUN) -m ruff format .
	$(CLANG_FORMAT) -i $(CUDA_SOURCES)

docs: $(READY)
	$(RUN) -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || $(RUN) -m pip install -qq --disable-pip-version-check $$($(RUN) -c \
	    'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

kernels: $(READY)
	MTRAINING_CUDA=1 $(RUN) setup.py build_ext --inplace
	$(RUN) -m tools.kernels_report

compile_commands: $(READY)
	$(RUN) setup.py -q compile_commands

sanitize: kernels
	$(RUN) -m tools.sanitize.run $(SANITIZE_ARGS)

wheels: $(READY)
	tools/build_wheels.sh $(RUN)
	$(RUN) -m tools.check_wheels dist

clean:
	rm -rf .venv .venv-* .mtraining-ready build dist outputs site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find megatron_mtraining -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifeq ($(VENV),0)
$(READY): pyproject.toml
	$(SETUP_ENV) tools/setup_current.sh $(RUN)
	@touch $@
else
$(READY): pyproject.toml tools/setup_venv.sh
	$(SETUP_ENV) PYTHON="$(PYTHON)" TORCH="$(TORCH)" tools/setup_venv.sh $(VENV)
	@touch $@
endif
