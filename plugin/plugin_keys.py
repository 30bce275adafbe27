"""Lists the settings that plugins take, for whoever shows a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from pagedkv.plugin.config import Config
from pagedkv.plugin.plugin_settings import find_settings_model, read_settings
from pagedkv.plugin.registry import GROUPS, check_plugin_tables, list_entry_points, load_entry_point


@dataclass(frozen=True, slots=True)
class PluginKey:
    """One setting of a plugin that the config names, or has a table for."""

    path: str
    value: Any
    default: Any
    """None where there is no default."""
    description: str


def list_plugin_keys(config: Config) -> list[PluginKey]:
    """The settings of all plugins that the config names or has a table for. Imports these.

    Raises:
        ConfigError: a table or a setting is wrong.
        PluginError: a plugin does not load.
    """
    check_plugin_tables(config.plugins)
    named = {
        "pagedkv.backends": config.backend,
        "pagedkv.cache_managers": config.cache.manager,
        "pagedkv.kernels": config.kernels.name,
        "pagedkv.schedulers": config.scheduler.name,
        "pagedkv.models": config.model.adapter,
        "pagedkv.decoders": config.model.decoder,
    }
    plugins = [
        (point.name, load_entry_point(group, point))
        for group in GROUPS
        for point in list_entry_points(group)
        if point.name == named[group.name] or point.name in config.plugins
    ]
    return [key for name, plugin in plugins for key in _list_keys(name, plugin, config)]


def _list_keys(name: str, plugin: type, config: Config) -> Iterator[PluginKey]:
    model = find_settings_model(plugin)
    if model is None:
        return
    settings = read_settings(name, plugin, config.plugins)
    for field, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True)
        default = None if default is PydanticUndefined else default
        path = f"plugins.{name}.{info.alias or field}"
        yield PluginKey(path, getattr(settings, field), default, info.description or "")
