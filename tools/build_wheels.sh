#!/usr/bin/env bash
# Builds what is released, into dist/: build_wheels.sh PYTHON, which needs setuptools.
#   a source distribution; a wheel with the CUDA kernels for each supported Python found here; one wheel without them
# nvcc is needed, a GPU and torch are not.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
rm -rf dist ./*.egg-info # setuptools also packs what an earlier egg-info lists
"$python" -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >build-sdist.log 2>&1 ||
    { cat build-sdist.log >&2; exit 1; }
rm build-sdist.log

# setuptools packs whatever an earlier build left in build/lib*. The compiled objects in build/kernels are kept.
wheel() { rm -rf build/lib* build/bdist*; "$1" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .; }

for version in 3.11 3.12; do
    if found=$(tools/find_python.sh "$version" 2>/dev/null); then
        MTRAINING_CUDA=1 wheel "$found"
    else
        echo "No Python $version here, so no wheel for it."
    fi
done
MTRAINING_CUDA=0 wheel "$python"
rm -rf build/lib* build/bdist*
