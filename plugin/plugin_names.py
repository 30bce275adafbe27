"""Names of installed plugins, by entry point; imports none of them."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

GROUP_NAMES = tuple(
    f"pagedkv.{kind}" for kind in ("backends", "cache_managers", "kernels", "schedulers", "models", "decoders")
)
"""The entry-point groups of `pagedkv.plugin.registry`."""


def list_plugin_names() -> list[str]:
    """Names of all installed plugins of all groups, sorted."""
    return sorted({point.name for group in GROUP_NAMES for point in entry_points(group=group)})


def find_plugin_key(variable: str) -> str | None:
    """The dotted key of a plugin's setting for an environment variable, less its prefix; None if it is none.

    >>> find_plugin_key("PLUGINS_CONTINUOUS_MAX_WAIT"), find_plugin_key("PLUGINS_NOBODY_KEY")
    ('plugins.continuous.max_wait', None)
    """
    if not variable.startswith("PLUGINS_"):
        return None
    rest = variable.removeprefix("PLUGINS_")
    for name in sorted(list_plugin_names(), key=len, reverse=True):
        prefix = re.sub(r"[^A-Z0-9]", "_", name.upper()) + "_"
        if rest.startswith(prefix) and rest != prefix:
            return f"plugins.{name}.{rest.removeprefix(prefix).lower()}"
    return None
