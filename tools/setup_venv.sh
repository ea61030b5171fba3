#!/usr/bin/env bash
# Makes the environment that `make demo` and `make test` use: setup_venv.sh FOLDER, with PYTHON and TORCH from make.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
python=${PYTHON:-$(tools/find_python.sh)}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    { echo "PYTHON must be a Python interpreter, got $python." >&2; exit 1; }
case $version in
    # The pairs of Python and torch that the tests run on.
    3.11) torch=torch==2.13.0 ;;
    3.12) torch=torch==2.11.0 ;;
    *) echo "PYTHON must be Python 3.11 or 3.12, got $version ($python). Name another: make ... PYTHON=python3.12" >&2; exit 1 ;;
esac

echo "Setting up $folder with Python $version: once, some minutes, mostly the download of torch."
# A folder that is there keeps what pip finds still right, unless its Python is another one.
if ! "$folder/bin/python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
    "$python" -m venv --clear "$folder"
fi
pip=("$folder/bin/python" -m pip install -qq --disable-pip-version-check)
"${pip[@]}" --upgrade pip "setuptools>=68" wheel
# Unquoted on purpose: TORCH may carry pip options beside the package.
# shellcheck disable=SC2086
"${pip[@]}" ${TORCH:-$torch}
# Two set-ups at once would write the same build files here: one waits, where the file system knows locks. NFS has them
# for files that are open for writing.
if command -v flock >/dev/null; then exec 9>> pyproject.toml; flock 9 || true; fi
# Without build isolation setup.py sees this torch, and torch is not downloaded a second time.
"${pip[@]}" --no-build-isolation --editable ".[megatron,demo,test,dev]"
"$folder/bin/python" -c 'import torch; print("torch", torch.__version__, "CUDA" if torch.cuda.is_available() else "CPU")'
