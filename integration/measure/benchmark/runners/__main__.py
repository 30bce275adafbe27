"""`python -m runners KIND OPTIONS`: loads one engine and serves repetitions over standard input and output."""

from __future__ import annotations

import importlib
import json
import sys

from .protocol import serve

LOADERS = {
    "pagedkv": ("in_process", "load"),
    "pagedkv-tgi": ("through_tgi", "load"),
    "pagedkv-smg": ("through_smg", "load"),
    "vllm": ("vllm_engine", "load"),
    "vllm-one-process": ("vllm_engine", "load_one_process"),
    "openvino": ("openvino_engine", "load"),
    "transformers": ("transformers_engine", "load"),
    "llama-cpp": ("llama_cpp_engine", "load"),
}
"""By kind: a module, and its function that makes an engine from options."""


def main() -> None:
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    module, function = LOADERS[kind]
    serve(lambda: getattr(importlib.import_module(f".{module}", __package__), function)(options))


# Engines that start processes import this module again.
if __name__ == "__main__":
    main()
