#!/bin/sh
# zig's clang for Linux with glibc 2.28: a cross-compiler for wheels that run on every system since 2018.
#
#   zig.sh PYTHON MACHINE FOLDER    write FOLDER/cc, c++, ar and ranlib; PYTHON has the package ziglang
set -eu
# Not `python -m ziglang`: where pip builds, that Python does not see its packages.
zig=$("$1" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
mkdir -p "$3"
for tool in cc c++ ar ranlib; do
    case $tool in c*) target="-target $2-linux-gnu.2.28" ;; *) target= ;; esac
    # Clang cannot name a target with a version, and zig has names of its own for instruction sets.
    cat >"$3/$tool" <<END
#!/bin/sh
[ "\${1:-}" = -dumpmachine ] && echo "$2-linux-gnu" && exit
for each; do
    shift
    [ "\$each" = -march=armv8.2-a+dotprod ] && each=-mcpu=generic+v8_2a+dotprod
    set -- "\$@" "\$each"
done
exec "$zig" $tool $target "\$@"
END
    chmod +x "$3/$tool"
done
