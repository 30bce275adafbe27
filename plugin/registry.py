"""Finds plugins by entry point. Only the plugin that is named gets imported.

>>> load_plugin(SCHEDULERS, "continous")
Traceback (most recent call last):
    ...
pagedkv.plugin.errors.PluginError: unknown scheduler 'continous'; did you mean 'continuous'? Known: continuous
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from typing_extensions import get_protocol_members

from pagedkv.plugin.config import PluginTables
from pagedkv.plugin.decoder import DecoderKernels
from pagedkv.plugin.errors import ConfigError, PluginError
from pagedkv.plugin.features import find_version_fault
from pagedkv.plugin.interface import (
    AttentionKernels,
    Backend,
    CacheManager,
    ModelAdapter,
    Scheduler,
)
from pagedkv.plugin.plugin_names import list_plugin_names
from pagedkv.plugin.plugin_settings import check_table, hint_nearest, read_settings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group(Generic[T]):
    """An entry-point group and the interface that its plugins implement."""

    name: str
    interface: type[T]
    noun: str
    factory: str = "create"
    """The class method that makes an object."""


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
MODELS: Group[ModelAdapter] = Group("pagedkv.models", ModelAdapter, "model adapter", "load")  # type: ignore[type-abstract]

DECODERS: Group[DecoderKernels] = Group("pagedkv.decoders", DecoderKernels, "decoder kernels")  # type: ignore[type-abstract]

GROUPS: tuple[Group[Any], ...] = (BACKENDS, CACHE_MANAGERS, KERNELS, SCHEDULERS, MODELS, DECODERS)


FACTORIES = {group.factory for group in GROUPS}
FACTORY_EXTRAS = ("settings", "plugins")
"""What a factory may take beside the arguments of its interface: see `create_plugin`."""


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


def create_plugin(group: Group[T], name: str, tables: PluginTables, *args: Any, **kwargs: Any) -> T:
    """Loads a plugin and makes an object of it, with the settings of its table where it takes some.

    Args:
        tables: `ResolvedConfig.plugins`. A plugin whose factory has a parameter `plugins` makes others, and gets them.
        args, kwargs: of the factory.

    Raises:
        PluginError: see `load_plugin`.
        ConfigError: a setting is wrong.
    """
    plugin = load_plugin(group, name)
    make = getattr(plugin, group.factory)
    settings = read_settings(name, plugin, tables)
    if settings is not None:
        kwargs["settings"] = settings
    if "plugins" in inspect.signature(make).parameters:
        kwargs["plugins"] = tables
    made: T = make(*args, **kwargs)
    return made


def check_plugin_tables(tables: PluginTables) -> None:
    """Checks the settings of all plugins; imports those for which there are some.

    Raises:
        ConfigError: no plugin of a name is installed, or see `check_table`.
    """
    for name, table in tables.items():
        points = [(group, point) for group in GROUPS for point in list_entry_points(group) if point.name == name]
        if not points:
            known = list_plugin_names()
            raise ConfigError(
                f"[plugins.{name}]: no plugin of this name is installed{hint_nearest(name, known)} "
                f"Known: {', '.join(known)}"
            )
        check_table(name, _load_those_that_load(points), table)


def _load_those_that_load(points: list[tuple[Group[Any], EntryPoint]]) -> list[type]:
    """A config may serve several machines: a plugin that can't be imported here says so where it is chosen."""
    tried = [_try_to_load(group, point) for group, point in points]
    plugins = [one for one in tried if not isinstance(one, PluginError)]
    if not plugins:
        raise next(one for one in tried if isinstance(one, PluginError))
    return plugins


def _try_to_load(group: Group[Any], point: EntryPoint) -> type | PluginError:
    try:
        return load_entry_point(group, point)
    except PluginError as error:
        return error


def find_interface_faults(plugin: object, interface: type) -> list[str]:
    """Returns what a class lacks of an interface; empty if it implements it. Types are not compared."""
    if not inspect.isclass(plugin):
        return [f"it names {plugin!r}, which is no class"]
    if fault := find_version_fault(getattr(plugin, "interface_version", None)):
        return [fault]
    return _attribute_faults(plugin) + [
        fault
        for member in sorted(get_protocol_members(interface))
        for fault in _member_faults(plugin, interface, member)
    ]


def _attribute_faults(plugin: type) -> list[str]:
    faults = []
    model = getattr(plugin, "settings_model", None)
    if model is not None and not (inspect.isclass(model) and issubclass(model, BaseModel)):
        faults.append(f"settings_model is {model!r}; it must be a pydantic model (a subclass of BaseModel)")
    for attribute in ("features", "plan_features"):
        names: Any = getattr(plugin, attribute, frozenset())
        if not isinstance(names, property) and not _is_set_of_names(names):
            faults.append(f"{attribute} is {names!r}; it must be a frozenset of names")
    return faults


def _is_set_of_names(value: Any) -> bool:
    return isinstance(value, frozenset | set) and all(isinstance(one, str) for one in value)


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
        and not (member in FACTORIES and name in FACTORY_EXTRAS)
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    ]
    return faults


def _unknown_name(group: Group[Any], name: str, known: list[str]) -> str:
    listed = ", ".join(known) or "none (is pagedkv installed?)"
    return f"unknown {group.noun} {name!r}{hint_nearest(name, known)} Known: {listed}"


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
