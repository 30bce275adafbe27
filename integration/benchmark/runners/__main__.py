"""`python -m runners KIND OPTIONS`: loads one engine and serves repetitions over standard input and output."""

from __future__ import annotations

import importlib
import json
import sys

from .protocol import serve

MODULES = {
    "pagedkv": "in_process",
    "pagedkv-grpc": "through_grpc",
    "vllm": "vllm_engine",
    "openvino": "openvino_engine",
    "transformers": "transformers_engine",
    "llama-cpp": "llama_cpp_engine",
}
"""By kind: a module whose `load(options)` returns an engine."""


def main() -> None:
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    serve(lambda: importlib.import_module(f".{MODULES[kind]}", __package__).load(options))


# Engines that start processes of their own import this module again.
if __name__ == "__main__":
    main()
