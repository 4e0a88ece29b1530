#!/bin/sh
# Runs laws and measurements of training and of compression on a GPU, in less than seven minutes.
#
#     scripts/gpu/check.sh [folder]
#
# Needs Python with torch for CUDA, Triton, numpy, numba, pytest and hypothesis; nothing is installed
# and no network is used. Training needs more of the extra `train` of pyproject.toml, but neither
# TorchRec nor FBGEMM: wheels that scripts/gpu/wheels.sh has put into build/gpu are unpacked to a
# temporary folder.
#
# Writes gpu_train_<card> and gpu_<card>, both .md and .json, to the folder, by default
# docs/benchmarks; training first, and each page as far as it came. The exit code is 0 if all laws
# hold and all was measured, 2 without a GPU.
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="$PWD:$PWD/tests" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
python3 -c '
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"scripts/gpu/check.sh: torch {torch.__version__} sees no CUDA device here; it needs one")
' || exit 2
if ls build/gpu/*.whl >/dev/null 2>&1; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    python3 -m pip install -q --no-index --no-deps --target "$site" build/gpu/*.whl
    PYTHONPATH="$PYTHONPATH:$site"
fi
status=0
laws() {
    timeout "$1" python3 -m pytest -q --noconftest -p no:cacheprovider --tb=short "$2" -k "$3" ||
        status=1
}
# Of all worlds those that compile few kernels for the CPU.
laws 100 tests/train/test_devices_of_worlds.py "gpu and (single or tables or cross or dense or dct)"
timeout 105 python3 scripts/gpu/train.py "${1:-docs/benchmarks}" --seconds 75 || status=1
# Those for the CPU are left out.
laws 80 tests/compress/device "not (plain_torch_sends or many_bytes or host_reads or crosses)"
timeout 80 python3 scripts/gpu/measure.py "${1:-docs/benchmarks}" || status=1
laws 50 tests/compress/library/test_device_ranks.py "" # two processes, gloo
exit $status
