"""From a written config to a running backend, by entry points alone."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.plugin.config import Config
from pagedkv.plugin.interface import Backend, Tokenizer
from pagedkv.plugin.registry import BACKENDS, MODELS, load_plugin
from pagedkv.plugin.resolved_config import ResolvedConfig, resolve_config, resolve_model_settings


@dataclass(frozen=True, slots=True)
class Assembly:
    """A backend, not yet warmed up, and what belongs to it."""

    backend: Backend
    tokenizer: Tokenizer
    config: ResolvedConfig


def assemble(config: Config) -> Assembly:
    """Finds the named plugins, loads model and tokenizer.

    Raises:
        ConfigError, PluginError, UnsupportedError: with what to change.
    """
    settings = resolve_model_settings(config)
    backend_class = load_plugin(BACKENDS, config.backend)
    adapter = load_plugin(MODELS, settings.adapter)
    resolved = resolve_config(config, adapter.describe(settings))
    tokenizer = adapter.load_tokenizer(settings)
    return Assembly(backend_class.create(resolved), tokenizer, resolved)
