"""The settings of plugins: tables [plugins.NAME] of the config, read with each plugin's own pydantic model.

A table goes to every plugin of its name (attention and decoder kernels may share one); each takes the keys of its own
`settings_model`, and a key that none of them knows is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from pagedkv.plugin.config import PluginTables
from pagedkv.plugin.errors import ConfigError


def find_settings_model(plugin: type) -> type[BaseModel] | None:
    """The pydantic model of a plugin's settings; None if it takes none."""
    return getattr(plugin, "settings_model", None)


def read_settings(name: str, plugin: type, tables: PluginTables) -> BaseModel | None:
    """The settings of a plugin from the keys of its table that it knows; None if it takes none.

    Raises:
        ConfigError: a bad value, or a key that is missing and has no default.
    """
    model = find_settings_model(plugin)
    if model is None:
        return None
    known = list_keys(model)
    values = {key: value for key, value in tables.get(name, {}).items() if key in known}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = "\n".join(f"  {_explain(name, detail)}" for detail in error.errors())
        raise ConfigError(f"the settings of a plugin are not valid:\n{faults}") from None


def list_keys(model: type[BaseModel]) -> list[str]:
    """The names under which a config may give the fields of a model."""
    return [alias for name, info in model.model_fields.items() for alias in {name, info.alias or name}]


def check_table(name: str, plugins: Sequence[type], table: Mapping[str, Any]) -> None:
    """Checks a table against all plugins of its name.

    Raises:
        ConfigError: none of them takes settings, or none knows a key (the nearest known one is named).
    """
    models = [model for plugin in plugins if (model := find_settings_model(plugin)) is not None]
    if not models:
        raise ConfigError(f"the plugin {name!r} takes no settings: leave out the table [plugins.{name}]")
    known = sorted({key for model in models for key in list_keys(model)})
    for key in table:
        if key not in known:
            raise ConfigError(f"unknown key plugins.{name}.{key}{hint_nearest(key, known)} Known: {', '.join(known)}")
    for plugin in plugins:
        read_settings(name, plugin, {name: table})


def hint_nearest(name: str, known: Iterable[str]) -> str:
    """What follows an unknown name in a message: the nearest known one, if any is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ";"


def _explain(name: str, detail: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in ("plugins", name, *detail["loc"]))
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{path}: {message}" if detail["type"] == "missing" else f"{path}: {message} (found {detail['input']!r})"
