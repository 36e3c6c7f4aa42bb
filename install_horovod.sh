#!/bin/sh
# Build Horovod against the torch and the MPI of an environment: sh install_horovod.sh BIN CONSTRAINTS
#
# BIN is the environment's folder of programs. Horovod 0.28.1, the last release, comes as source
# only. It asks the compiler for C++14, where the headers of today's PyTorch need C++17 (the last
# -std wins), and GCC 13 no longer brings some standard headers in by itself. The wheel that pip
# would keep is not used, since pip does not know which torch and MPI it was built against.
set -eu
bin=$(cd "$1" && pwd)
constraints=$2

if "$bin/python" -c 'import torch, horovod.torch' 2>/dev/null; then
    echo "Horovod is installed already"
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/c++" <<EOF
#!/bin/sh
exec ${CXX:-g++} -include string -include cstdint -include stdexcept -include functional -include memory "\$@" -std=c++17
EOF
chmod +x "$folder/c++"
echo "building Horovod, which takes 2 to 5 minutes ..."
"$bin/pip" install --quiet --constraint "$constraints" cloudpickle pyyaml packaging cffi
PATH="$bin:$PATH" CXX="$folder/c++" MAKEFLAGS="-j$(getconf _NPROCESSORS_ONLN)" \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 \
    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    "$bin/pip" install --quiet --constraint "$constraints" --no-build-isolation --no-cache-dir \
    --no-deps --force-reinstall horovod >"$folder/log" 2>&1 || {
    grep -A 4 -E "CMake Error|[^-]error: [^s]|No such file" "$folder/log" | head -n 40 >&2
    tail -n 5 "$folder/log" >&2
    echo "Horovod could not be built; all but studies with training.backend = \"horovod\" runs without" >&2
    exit 1
}
"$bin/python" -c 'import torch, horovod.torch'
