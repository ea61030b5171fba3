#!/usr/bin/env bash
# Installs what is missing into the current environment and keeps its torch: setup_current.sh PYTHON (make VENV=0).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
pinned=$(mktemp)
trap 'rm -f "$pinned"' EXIT
# pip compares with the version in the package's metadata; torch.__version__ may have more, +cu130 for example.
"$python" -c 'import torch, importlib.metadata as of; print("torch==" + of.version("torch"))' > "$pinned" ||
    { echo "VENV=0 must be run where torch is installed; $python has none. Leave VENV out, or use an NGC PyTorch container." >&2
      exit 1; }

echo "Using the current environment ($(cat "$pinned")), which is kept."
# The constraint makes pip stop rather than replace torch; PIP_CONSTRAINT, which NGC's containers set, holds beside it.
install() {
    "$python" -m pip install -qq --disable-pip-version-check --constraint "$pinned" "$@" || {
        [ -z "${PIP_CONSTRAINT:-}" ] ||
            echo "PIP_CONSTRAINT may pin what must be newer, got $PIP_CONSTRAINT. torch is kept without it too:" \
                "run the same command with PIP_CONSTRAINT= before it." >&2
        exit 1
    }
}
# Without build isolation the build sees this torch and these: setuptools before 70 makes wheels with the package wheel.
install "setuptools>=68" wheel
install --no-deps --no-build-isolation --editable .
install --no-build-isolation --editable ".[megatron,demo,test,dev]"
