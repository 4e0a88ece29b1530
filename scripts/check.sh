#!/usr/bin/env bash
# Everything that must pass, cheapest first. With --quick only tests that start no processes, with
# --all also those marked slow.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=(tests) markers="not slow"
case "${1:-}" in
    --quick) tests=(tests/{compress,config,telemetry,wire} tests/test_architecture.py) ;;
    --all) markers="" ;;
esac
export OMP_NUM_THREADS=1
ruff check .
ruff format --check .
lint-imports --no-cache
pyright
# Two at a time: each may be a world of processes. A file's tests stay together for their fixtures.
pytest "${tests[@]}" -m "$markers" --numprocesses 2 --dist loadfile
