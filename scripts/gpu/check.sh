#!/bin/sh
# Runs laws and measurements of compression and of training on a GPU, in about four minutes.
#
#     scripts/gpu/check.sh [folder]
#
# Needs Python with torch for CUDA, Triton, numpy, numba, pytest and hypothesis; nothing is installed
# and no network is used. Training needs more of the extra `train` of pyproject.toml, but neither
# TorchRec nor FBGEMM: wheels that scripts/gpu/wheels.sh has put into build/gpu are unpacked to a
# temporary folder.
#
# Writes gpu_<card> and gpu_train_<card>, both .md and .json, to the folder, by default
# docs/benchmarks. The exit code is 0 if all laws hold and all was measured.
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
laws() { timeout 80 python3 -m pytest -q --noconftest -p no:cacheprovider --tb=short "$@"; }
status=0
laws tests/compress/device -k "not plain_torch_sends" || status=1 # that one is for the CPU
timeout 90 python3 scripts/gpu/measure.py "${1:-docs/benchmarks}" || status=1
if ls build/gpu/*.whl >/dev/null 2>&1; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --target "$site" build/gpu/*.whl
    PYTHONPATH="$PYTHONPATH:$site"
fi
# Of all worlds those that compile few kernels for the CPU.
laws tests/train/test_devices_of_worlds.py -k "gpu and (single or cross or dense or dct)" || status=1
timeout 60 python3 scripts/gpu/train.py "${1:-docs/benchmarks}" || status=1
laws tests/compress/library/test_device_ranks.py || status=1 # two processes, gloo
exit $status
