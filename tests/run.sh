#!/usr/bin/env bash
# All that must hold before a change goes in: lint, types, import rules, tests. Arguments go to pytest.
#
#   bash tests/run.sh                         everything
#   bash tests/run.sh tests/plugin -k fork    the checks, and some tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Our kernels/ must not shadow Hugging Face's package of that name, as it would with this folder on sys.path.
export PYTHONSAFEPATH=1
set -- "$@"
arguments=("$@")

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

step ruff check .
step ruff format --check .
step mypy -p pagedkv.plugin -p pagedkv.kernels -p pagedkv.adapters -p pagedkv.integration
step env PYTHONPATH=build/tree lint-imports
step pagedkv demo-model
step pytest -n 2 "${arguments[@]}"
