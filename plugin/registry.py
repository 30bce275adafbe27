"""Finds plugins by entry point. Only the plugin that is named gets imported.

>>> load_plugin(SCHEDULERS, "continous")
Traceback (most recent call last):
    ...
pagedkv.plugin.errors.PluginError: unknown scheduler 'continous'; did you mean 'continuous'? Known: continuous
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from typing_extensions import get_protocol_members

from pagedkv.plugin.decoder import DecoderKernels
from pagedkv.plugin.errors import PluginError
from pagedkv.plugin.interface import (
    INTERFACE_VERSION,
    AttentionKernels,
    Backend,
    CacheManager,
    ModelAdapter,
    Scheduler,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group(Generic[T]):
    """An entry-point group and the interface that its plugins implement."""

    name: str
    interface: type[T]
    noun: str


BACKENDS: Group[Backend] = Group("pagedkv.backends", Backend, "backend")  # type: ignore[type-abstract]
CACHE_MANAGERS: Group[CacheManager] = Group(
    "pagedkv.cache_managers",
    CacheManager,  # type: ignore[type-abstract]
    "cache manager",
)
KERNELS: Group[AttentionKernels] = Group(
    "pagedkv.kernels",
    AttentionKernels,  # type: ignore[type-abstract]
    "attention kernels",
)
SCHEDULERS: Group[Scheduler] = Group("pagedkv.schedulers", Scheduler, "scheduler")  # type: ignore[type-abstract]
MODELS: Group[ModelAdapter] = Group("pagedkv.models", ModelAdapter, "model adapter")  # type: ignore[type-abstract]

DECODERS: Group[DecoderKernels] = Group("pagedkv.decoders", DecoderKernels, "decoder kernels")  # type: ignore[type-abstract]

GROUPS: tuple[Group[Any], ...] = (BACKENDS, CACHE_MANAGERS, KERNELS, SCHEDULERS, MODELS, DECODERS)


def list_entry_points(group: Group[Any]) -> list[EntryPoint]:
    """All entry points of a group, sorted by name; imports nothing."""
    return sorted(entry_points(group=group.name), key=lambda point: point.name)


def load_plugin(group: Group[T], name: str) -> type[T]:
    """Imports the plugin of this name and checks that it implements the group's interface.

    Raises:
        PluginError: unknown name (the message lists the known ones), two distributions with this name, a failing import
            (with the name of its distribution), or a class that does not implement the interface.
    """
    points = list_entry_points(group)
    named = [point for point in points if point.name == name]
    if not named:
        raise PluginError(_unknown_name(group, name, [point.name for point in points]))
    if len({point.value for point in named}) > 1:
        sources = ", ".join(_distribution(point) for point in named)
        raise PluginError(f"several distributions bring the {group.noun} {name!r}: {sources}; uninstall all but one")
    return load_entry_point(group, named[0])


def load_entry_point(group: Group[T], point: EntryPoint) -> type[T]:
    """Imports one entry point and checks it. Raises PluginError, as `load_plugin` does."""
    try:
        plugin = point.load()
    except Exception as error:
        raise PluginError(
            f"the {group.noun} {point.name!r} of {_distribution(point)} fails to import: "
            f"{type(error).__name__}: {error}"
        ) from error
    faults = find_interface_faults(plugin, group.interface)
    if faults:
        raise PluginError(
            f"the {group.noun} {point.name!r} of {_distribution(point)} does not fit "
            f"{group.interface.__name__}: {'; '.join(faults)}"
        )
    return plugin  # type: ignore[no-any-return]


def find_interface_faults(plugin: object, interface: type) -> list[str]:
    """Returns what a class lacks of an interface; empty if it implements it. Types are not compared."""
    if not inspect.isclass(plugin):
        return [f"it names {plugin!r}, which is no class"]
    version = getattr(plugin, "interface_version", None)
    if version != INTERFACE_VERSION:
        return [f"it states interface_version {version}, this pagedkv speaks {INTERFACE_VERSION}"]
    return [
        fault
        for member in sorted(get_protocol_members(interface))
        for fault in _member_faults(plugin, interface, member)
    ]


def _member_faults(plugin: type, interface: type, member: str) -> list[str]:
    wanted = inspect.getattr_static(interface, member, None)
    if wanted is None:
        return []
    if not hasattr(plugin, member):
        return [f"{member} is missing"]
    if not isinstance(wanted, (classmethod, staticmethod)) and not inspect.isfunction(wanted):
        return []
    if not callable(getattr(plugin, member)):
        return [f"{member} is no method"]
    return _parameter_faults(member, getattr(plugin, member), getattr(interface, member))


def _parameter_faults(member: str, method: Callable[..., Any], wanted: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return []
    kinds = {parameter.kind for parameter in parameters.values()}
    wanted_names = list(inspect.signature(wanted).parameters)
    faults = [
        f"{member} takes no parameter {name!r}"
        for name in wanted_names
        if name not in parameters and not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    ]
    faults += [
        f"{member} demands a parameter {name!r}"
        for name, parameter in parameters.items()
        if name not in wanted_names
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    ]
    return faults


def _unknown_name(group: Group[Any], name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"unknown {group.noun} {name!r}{hint} Known: {', '.join(known) or 'none (is pagedkv installed?)'}"


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
