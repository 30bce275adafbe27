#!/bin/bash
# Starts the launcher as the published image does, but with pagedkv's text-generation-server first on PATH.

ldconfig 2>/dev/null || true  # as the published image; only root can

# The stock environment has what the router's Python imports. Activating it puts its own text-generation-server first on
# PATH, before all that an image built on it has set: ours goes before it afterwards.
source /usr/src/.venv/bin/activate
export PATH=/opt/pagedkv/launcher:$PATH
/opt/pagedkv/bin/pagedkv check-server --command || exit 1

# The router writes the tokenizer's files into the folder it runs in.
[[ -w . ]] || cd "$(mktemp -d)" || exit 1
exec text-generation-launcher "$@"
