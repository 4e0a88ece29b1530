#!/usr/bin/env bash
# Everything that must pass, cheapest first. With --quick only rooms without processes, files of runs
# or whole commands, and few examples of hypothesis; with --all many, and tests marked slow.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=(tests) markers="not slow" profile=fixed
case "${1:-}" in
    --quick)
        profile=quick
        tests=(tests/{compress,config,telemetry,wire} tests/test_architecture.py)
        tests+=(--ignore=tests/config/test_foreign_code.py --ignore=tests/config/test_any_overrides.py)
        ;;
    --all) markers="" profile=thorough ;;
esac
export OMP_NUM_THREADS=1
trap wait EXIT
pyright & types=$!
ruff check .
ruff format --check .
lint-imports --no-cache
wait "$types"
# Two at a time: each may be a world of processes. A file's tests stay together for their fixtures.
pytest "${tests[@]}" -m "$markers" --hypothesis-profile="$profile" --numprocesses 2 --dist loadfile
