#!/bin/sh
# Brings the wheels that scripts/gpu/check.sh needs for training to build/gpu, 10 MB in all.
#
#     scripts/gpu/wheels.sh [python of the machine with the GPU, by default 3.12]
#
# For x86-64: what the extra `train` needs, but what machines with torch for CUDA mostly have, and
# but TorchRec and FBGEMM, which one process with embedding.kernel=numba does without.
cd "$(dirname "$0")/../.." || exit 1
mkdir -p build/gpu
python3 -m pip download --quiet --no-deps --only-binary=:all: --dest build/gpu \
    --implementation cp --python-version "${1:-3.12}" --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    'hydra-core<1.4' 'omegaconf<2.4' isal pydantic==2.14.4 pydantic-core==2.50.5 annotated-types \
    typing-inspection pyzmq zstandard &&
    python3 -m pip wheel --quiet --no-deps --wheel-dir build/gpu antlr4-python3-runtime==4.9.3
