"""What the SMG gateway is told of a worker, read from the config and the model's files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pagedkv.adapters.smg.worker import WorkerFacts
from pagedkv.integration.serve.model_name import default_model_name
from pagedkv.integration.serve.weights import find_model_directory
from pagedkv.plugin.config import Config
from pagedkv.plugin.resolved_config import ResolvedConfig

logger = logging.getLogger(__name__)

_DEFAULT_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Of generation_config.json, those that the gateway fills in where a client names nothing."""


def read_worker_facts(config: Config, resolved: ResolvedConfig) -> WorkerFacts:
    """Reads config.json and generation_config.json of the model; a file that is missing or broken says nothing."""
    directory = find_model_directory(config.model.path, config.model.revision or None) or Path(config.model.path)
    defaults = _read_json(directory / "generation_config.json")
    named = {name: defaults[name] for name in _DEFAULT_PARAMETERS if isinstance(defaults.get(name), (int, float))}
    return WorkerFacts(
        model_directory=directory.absolute(),
        served_model_name=config.server.served_model_name or default_model_name(config.model.path),
        model_type=str(_read_json(directory / "config.json").get("model_type", "")),
        default_sampling_params_json=json.dumps(named) if named else "",
        max_num_sequences=resolved.scheduler.max_num_sequences,
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        logger.debug("%s can't be read", file)
        return {}
    return content if isinstance(content, dict) else {}
