#!/usr/bin/env bash
# All that must hold before a change goes in: lint, types, import rules, tests. Other arguments go to pytest.
#
#   bash tests/run.sh                         everything
#   bash tests/run.sh --fast                  the checks, and all tests but those marked slow: for while you write
#   bash tests/run.sh tests/plugin -k fork    the checks, and some tests
#
# How to write a test that costs little: tests/README.md
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Our kernels/ must not shadow Hugging Face's package of that name, as it would with this folder on sys.path.
export PYTHONSAFEPATH=1
# Tests start dozens of processes: each would compile the same modules again.
unset PYTHONDONTWRITEBYTECODE
arguments=()
for argument in "$@"; do
  if [[ "$argument" == --fast ]]; then arguments+=(-m "not slow"); else arguments+=("$argument"); fi
done

set -- demo dev gpu otel bench
# shellcheck source=integration/venv.sh
source integration/venv.sh "$@"
export PATH="$PWD/.venv/bin:$PATH"

step() {
  echo "== $*"
  "$@"
}

# mypy and import-linter read folders, not the editable install: here the packages lie as they are imported.
mkdir -p build/tree/pagedkv
for package in plugin kernels adapters integration; do ln -sfn "../../../$package" "build/tree/pagedkv/$package"; done

check_statically() {
  step ruff check .
  step ruff format --check .
  step mypy -p pagedkv.plugin -p pagedkv.kernels -p pagedkv.adapters -p pagedkv.integration
  step env PYTHONPATH=build/tree lint-imports
}

# The demo model and the checks take a core each.
check_statically >build/checks.log 2>&1 &
checks=$!
step pagedkv demo-model
wait "$checks" || {
  cat build/checks.log
  exit 1
}
cat build/checks.log
step pytest -n 2 "${arguments[@]}"
