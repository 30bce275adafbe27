"""Describes how to start each engine: our backends with this interpreter, other engines with one that has them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.integration.demo_model import find_gguf_file, is_demo_model
from pagedkv.integration.measure.benchmark import runners
from pagedkv.integration.measure.benchmark.engine_process import EngineSpec
from pagedkv.plugin.errors import ConfigError

TRANSPORTS = {"process": "pagedkv", "tgi": "pagedkv-tgi", "smg": "pagedkv-smg"}
"""Transports to our backends, and the kind of runner for each."""

PEERS = ("vllm", "vllm-one-process", "openvino", "transformers", "llama-cpp")
_GGUF_PEERS = ("openvino", "llama-cpp")
"""Peers that read a GGUF file. For the demo model it is the file from which it was made."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Options for every peer."""

    model: Path
    models: Mapping[str, str]
    """Models of peers that read another file or directory, by peer."""
    dtype: str
    kv_bytes: int
    max_total_tokens: int


def make_backend_spec(
    backend: str, transport: str, config_file: Path | None, overrides: Mapping[str, Any], variant: str = ""
) -> EngineSpec:
    """Describes a backend of ours or of a plugin. Through a protocol its name is "NAME-tgi", "NAME-smg".

    Args:
        overrides: values of the config, by dotted key.
        variant: name of these values, appended to the backend's.

    Raises:
        ConfigError: the transport is unknown.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"--through takes {', '.join(TRANSPORTS)}, not {transport!r}")
    file = None if config_file is None else str(config_file.absolute())
    options = {"config_file": file, "overrides": {**overrides, "backend": backend}}
    parts = (backend, "" if transport == "process" else transport, variant)
    return _make_spec("-".join(filter(None, parts)), sys.executable, TRANSPORTS[transport], options)


def make_peer_spec(peer: str, options: PeerOptions) -> EngineSpec:
    """Describes another engine, from NAME=PYTHON. Only `transformers` may use this interpreter.

    Any other NAME=COMMAND is the user's own runner, which uses the protocol in `runners/protocol.py`.

    Raises:
        ConfigError: no interpreter is named, or there is no model that the peer can read.
    """
    name, _, python = peer.partition("=")
    if name not in PEERS:
        if not python:
            raise ConfigError(f"there is no peer {name!r}: take {', '.join(PEERS)}, or NAME=COMMAND, a runner of yours")
        return EngineSpec(name, [*shlex.split(python), json.dumps(_describe(name, options))])
    if not python and name != "transformers":
        raise ConfigError(f"--peer {name} needs an interpreter that has it: --peer {name}=PATH/bin/python")
    return _make_spec(name, os.path.expanduser(python) or sys.executable, name, _describe(name, options))


def _describe(name: str, options: PeerOptions) -> dict[str, Any]:
    return {
        "model": options.models.get(name) or _find_model(name, options.model),
        "dtype": options.dtype,
        "kv_bytes": options.kv_bytes,
        "max_total_tokens": options.max_total_tokens,
    }


def _find_model(name: str, model: Path) -> str:
    if name not in _GGUF_PEERS:
        return str(model.absolute())
    if not is_demo_model(model):
        raise ConfigError(f"{name} reads another kind of model: name it with --peer-model {name}=PATH")
    return str(find_gguf_file())


def _make_spec(name: str, python: str, kind: str, options: Mapping[str, Any]) -> EngineSpec:
    # Only the folder of `runners`, from which any interpreter can import.
    path = [str(Path(runners.__file__).parents[1])]
    if python == sys.executable and os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    return EngineSpec(name, [python, "-m", "runners", kind, json.dumps(options)], {"PYTHONPATH": os.pathsep.join(path)})


def split_names(values: Sequence[str] | None) -> list[str]:
    """Splits the values of an option that may be repeated or have several names with commas. Removes duplicates."""
    names = [name.strip() for value in values or () for name in value.split(",")]
    return list(dict.fromkeys(name for name in names if name))
