#!/bin/sh
# Runs the laws and the measurements of compression on a GPU, in about four minutes.
#
#     scripts/gpu/check.sh [folder]
#
# Needs Python with torch for CUDA, Triton, numpy, numba, pytest and hypothesis; nothing is installed
# and no network is used. Writes gpu_<card>.md and gpu_<card>.json to the folder, by default
# docs/benchmarks. The exit code is 0 if all laws hold and all was measured.
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
laws() { timeout 100 python3 -m pytest -q --noconftest -p no:cacheprovider --tb=short "$@"; }
status=0
laws tests/compress/device -k "not plain_torch_sends" || status=1 # that one is for the CPU
timeout 90 python3 scripts/gpu/measure.py "${1:-docs/benchmarks}" || status=1
laws tests/compress/library/test_device_ranks.py || status=1 # two processes, gloo
exit $status
