#!/usr/bin/env bash
# Prints the path of a supported Python: find_python.sh [3.11|3.12 ...], by default the first of python3, 3.12, 3.11.
set -u
wanted=("$@")
[ ${#wanted[@]} -gt 0 ] || wanted=(3.12 3.11)

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

candidates=(python3)
for version in "${wanted[@]}"; do
    candidates+=("python$version")
    # pyenv's shims refuse a version that is not the selected one, so its folders are asked too.
    candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/"python$version")
done
for candidate in "${candidates[@]}"; do
    found=$(version_of "$candidate") || continue
    for version in "${wanted[@]}"; do
        if [ "$found" = "$version" ]; then
            "$candidate" -c 'import sys; print(sys.executable)'
            exit 0
        fi
    done
done
echo "No Python ${wanted[*]} was found on PATH or under pyenv. Install one, or name it: make ... PYTHON=/path/to/python3.12" >&2
exit 1
