#!/usr/bin/env bash
# Everything that must pass, cheapest first. With --all also the tests marked slow.
set -euo pipefail
cd "$(dirname "$0")/.."
markers="not slow"
[ "${1:-}" = "--all" ] && markers=""
export OMP_NUM_THREADS=1
ruff check .
ruff format --check .
lint-imports --no-cache
pyright
# Two at a time: each may be a world of processes. A file's tests stay together for their fixtures.
pytest -m "$markers" --numprocesses 2 --dist loadfile
