"""How an interface grows without breaking plugins that were written before.

- A new *ability* (a method that makes a plugin better) is a protocol of its own, found by `isinstance`: `abilities.py`,
  `kv_events.py`, `kv_scales.py`. A plugin without it is served all the same.
- A new *feature* (what a plugin must understand, or its results are wrong) has a name. It stands in `features` of the
  layer, request or plan that needs it, and in `features` of each plugin that understands it. A plugin that does not
  name it is refused at start: silence is never taken for understanding.
- A version (major, minor) tells what a plugin was written against. A minor version only adds abilities and features.

>>> find_missing_features(object(), ["draft_tokens", "min_p"])
['draft_tokens', 'min_p']
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagedkv.plugin.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from pagedkv.plugin.interface import AttentionKernels, Backend
    from pagedkv.plugin.kv_dtypes import KVCacheSpec
    from pagedkv.plugin.model_spec import AttentionSpec

InterfaceVersion = tuple[int, int] | int
"""As a plugin states it: (major, minor), or the major version alone."""

INTERFACE_VERSION: tuple[int, int] = (2, 0)
"""Of the interfaces as they are here."""
SERVED_MAJOR_VERSIONS = (1, 2)
"""Version 2 took nothing from version 1, which had no minor versions: a plugin that states 1 is served."""


def read_interface_version(stated: object) -> tuple[int, int] | None:
    """The (major, minor) that a plugin states. None if it is no version.

    >>> read_interface_version(1), read_interface_version((2, 3)), read_interface_version("2")
    ((1, 0), (2, 3), None)
    """
    if isinstance(stated, int) and not isinstance(stated, bool):
        return (stated, 0)
    if isinstance(stated, tuple) and len(stated) == 2 and all(type(part) is int for part in stated):
        return stated
    return None


def find_version_fault(stated: object) -> str | None:
    """Why a plugin that states this version can't be served; None if it can."""
    version = read_interface_version(stated)
    spoken = ".".join(map(str, INTERFACE_VERSION))
    if version is None:
        return f"it states interface_version {stated!r}; it must be (major, minor), here {INTERFACE_VERSION}"
    if version[0] not in SERVED_MAJOR_VERSIONS or version > INTERFACE_VERSION:
        hint = "install a newer pagedkv" if version > INTERFACE_VERSION else "install a newer version of the plugin"
        return f"it states interface_version {version[0]}.{version[1]}, this pagedkv speaks {spoken}: {hint}"
    return None


def understood_features(plugin: object) -> frozenset[str]:
    """The names in `features` of a plugin, class or object; none where it has no such attribute."""
    return frozenset(getattr(plugin, "features", ()))


def find_missing_features(plugin: object, needed: Iterable[str]) -> list[str]:
    """Those of the features needed that a plugin does not name, sorted."""
    return sorted(set(needed) - understood_features(plugin))


def refuse_backend_without(backend: Backend, needed: Iterable[str], who: str) -> None:
    """Raises UnsupportedError, with what is missing, for a backend that would misread what `who` sends it."""
    if missing := find_missing_features(backend, needed):
        raise UnsupportedError(
            f"{who} needs features that the backend {backend.info.backend!r} does not name: {', '.join(missing)}"
        )


def find_layer_faults(
    kernels: AttentionKernels, layer: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype
) -> list[str]:
    """Why kernels can't run a layer: features that they do not name, and their own `unsupported_reasons`."""
    unknown = [f"they do not name the feature {name!r}" for name in find_missing_features(kernels, layer.features)]
    # Kernels that do not know a feature can't judge a layer that needs it.
    return unknown or kernels.unsupported_reasons(layer, cache_spec, dtype)
