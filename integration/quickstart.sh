#!/usr/bin/env bash
# From nothing to a real language model behind a paged KV cache: environment, model, server, questions, comparison.
# Needs Python 3.10 or newer (PYTHON names another than python3). Leaves .venv and the cached demo model behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
set -- demo
# shellcheck source=integration/venv.sh
source integration/venv.sh
# With this folder on sys.path our kernels/ would shadow Hugging Face's package of that name.
export PYTHONSAFEPATH=1
exec .venv/bin/python integration/quickstart.py
