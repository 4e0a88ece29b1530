#!/usr/bin/env bash
# Everything that must pass, cheapest first. With --quick only rooms without processes, files of runs
# or whole commands, few examples of hypothesis, and types of the package and imports checked beside
# them; with --all many, and tests marked slow.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=(tests) markers="not slow" profile=fixed processes=2 quick=
case "${1:-}" in
    --quick)
        quick=yes profile=quick processes=0 # the other core checks types
        tests=(tests/{config,telemetry,wire} tests/compress/{activation,gradient})
        tests+=(tests/compress/library/test_{packets,records,refusals}.py tests/test_architecture.py)
        tests+=(--ignore=tests/config/test_{any_overrides,foreign_code,messages,outside_choices,outside_methods}.py)
        tests+=(--deselect=tests/config/test_own_experiments.py::test_a_{run_of_ones_own,sweep_runs})
        tests+=(--deselect=tests/config/test_choices.py::test_an_experiment_goes_with_any_choice)
        ;;
    --all) markers="" profile=thorough ;;
esac
# Bytecode is kept: tests start dozens of interpreters, each of which would compile the package.
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
trap wait EXIT
ruff check .
ruff format --check .
pyright ${quick:+dlrm_hybrid} & types=$! # one core, as long as a quick check's rest takes the other
lint-imports --no-cache
[ -n "$quick" ] || wait "$types"
# Two at a time: each may be a world of processes. A file's tests stay together for their fixtures.
pytest "${tests[@]}" -m "$markers" --hypothesis-profile="$profile" --numprocesses "$processes" \
    --dist loadfile
wait "$types"
