"""Makes a backend from a written config; finds every part through its entry point."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.plugin.config import Config
from pagedkv.plugin.interface import Backend, Tokenizer
from pagedkv.plugin.registry import BACKENDS, MODELS, check_plugin_tables, create_plugin, load_plugin
from pagedkv.plugin.resolved_config import ResolvedConfig, resolve_config, resolve_model_settings


@dataclass(frozen=True, slots=True)
class Assembly:
    """A backend that is not warmed up yet, with its config and tokenizer."""

    backend: Backend
    tokenizer: Tokenizer
    config: ResolvedConfig


def assemble(config: Config) -> Assembly:
    """Loads the plugins that the config names, the model and the tokenizer.

    Raises:
        ConfigError, PluginError, UnsupportedError: the message says what to change.
    """
    settings = resolve_model_settings(config)
    check_plugin_tables(config.plugins)
    load_plugin(BACKENDS, config.backend)
    adapter = load_plugin(MODELS, settings.adapter)
    resolved = resolve_config(config, adapter.describe(settings))
    tokenizer = adapter.load_tokenizer(settings)
    return Assembly(create_plugin(BACKENDS, config.backend, config.plugins, resolved), tokenizer, resolved)
