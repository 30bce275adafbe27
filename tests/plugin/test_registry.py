"""Finding plugins: names, versions, distributions, and what happens when a plugin is broken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from pagedkv.plugin.errors import PluginError
from pagedkv.plugin.features import INTERFACE_VERSION
from pagedkv.plugin.interface import AttentionKernels, Scheduler
from pagedkv.plugin.registry import (
    GROUPS,
    KERNELS,
    SCHEDULERS,
    Group,
    find_interface_faults,
    list_entry_points,
    load_plugin,
)

GOOD_SCHEDULER = f"""
class Mine:
    interface_version = {INTERFACE_VERSION}

    @classmethod
    def create(cls, config, cache, num_cache_tokens): return cls()
    def add(self, sequence): ...
    def schedule(self, only=None, max_chunk_tokens=None): ...
    def commit(self, plan, finished): ...
    def fail(self, plan): ...
    def abort(self, ids): ...
    def stats(self): ...
"""

InstallDistribution = Callable[..., None]


@pytest.fixture
def install_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallDistribution]:
    """Makes a distribution with one module and entry points (name → value) that this process finds."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def install(distribution: str, source: str, points: dict[str, str], group: str = SCHEDULERS.name) -> None:
        module = distribution.replace("-", "_")
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-2.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.1\n")
        lines = [f"{name} = {module}:{value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def test_every_group_lists_the_plugins_that_the_package_registers() -> None:
    for group in GROUPS:
        own = {point.name for point in entry_points(group=group.name) if point.value.startswith("pagedkv.")}
        assert own, f"the package registers nothing under {group.name}"
        assert own <= {point.name for point in list_entry_points(group)}


OWN_POINTS = [
    (group, point.name) for group in GROUPS for point in list_entry_points(group) if point.value.startswith("pagedkv.")
]


@pytest.mark.parametrize(("group", "name"), OWN_POINTS, ids=[f"{group.name}:{name}" for group, name in OWN_POINTS])
def test_every_built_in_plugin_fits_its_interface(group: Group[Any], name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton", reason="an optional dependency")
    assert find_interface_faults(load_plugin(group, name), group.interface) == []


def test_a_strangers_scheduler_is_found_as_our_own_is(install_distribution: InstallDistribution) -> None:
    install_distribution("their-scheduler", GOOD_SCHEDULER, {"theirs": "Mine"})
    assert load_plugin(SCHEDULERS, "theirs").__name__ == "Mine"
    assert "theirs" in [point.name for point in list_entry_points(SCHEDULERS)]


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"unknown scheduler 'continuos'; did you mean 'continuous'\? Known: .*"):
        load_plugin(SCHEDULERS, "continuos")
    with pytest.raises(PluginError, match=r"unknown attention kernels 'zzz'; Known: auto, .*reference"):
        load_plugin(KERNELS, "zzz")


def test_listing_and_finding_import_only_the_plugin_that_is_named(install_distribution: InstallDistribution) -> None:
    install_distribution("first-plugin", GOOD_SCHEDULER, {"first": "Mine"})
    install_distribution("second-plugin", GOOD_SCHEDULER, {"second": "Mine"})
    list_entry_points(SCHEDULERS)
    assert not {"first_plugin", "second_plugin"} & sys.modules.keys()
    load_plugin(SCHEDULERS, "first")
    assert "first_plugin" in sys.modules
    assert "second_plugin" not in sys.modules


def test_a_plugin_that_fails_to_import_names_its_distribution_and_leaves_others_alone(
    install_distribution: InstallDistribution,
) -> None:
    install_distribution("broken-plugin", "import no_such_module_anywhere", {"broken": "Mine"})
    with pytest.raises(PluginError, match=r"'broken' of broken-plugin 2\.1 fails to import: ModuleNotFoundError"):
        load_plugin(SCHEDULERS, "broken")
    assert load_plugin(SCHEDULERS, "continuous")


def test_a_plugin_whose_class_is_missing_names_its_distribution(install_distribution: InstallDistribution) -> None:
    install_distribution("empty-plugin", "", {"empty": "Mine"})
    with pytest.raises(PluginError, match=r"'empty' of empty-plugin 2\.1 fails to import: AttributeError"):
        load_plugin(SCHEDULERS, "empty")


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def Mine(): ...", "which is no class"),
        (
            GOOD_SCHEDULER.replace(f"interface_version = {INTERFACE_VERSION}", "interface_version = 99"),
            "99.0, this pagedkv speaks 2.0: install a newer pagedkv",
        ),
        (GOOD_SCHEDULER.replace(f"interface_version = {INTERFACE_VERSION}", ""), "interface_version None"),
        (GOOD_SCHEDULER.replace(f"= {INTERFACE_VERSION}", "= (2, 1)"), "2.1, this pagedkv speaks 2.0"),
        (GOOD_SCHEDULER.replace(f"= {INTERFACE_VERSION}", "= 0"), "install a newer version of the plugin"),
        (GOOD_SCHEDULER.replace(f"= {INTERFACE_VERSION}", "= '2.0'"), "interface_version '2.0'; it must be (major"),
        (GOOD_SCHEDULER + "    features = 'latent'\n", "features is 'latent'; it must be a frozenset"),
        (GOOD_SCHEDULER + "    settings_model = dict\n", "it must be a pydantic model"),
        (GOOD_SCHEDULER.replace("def fail(self, plan): ...", ""), "fail is missing"),
        (GOOD_SCHEDULER.replace("def fail(self, plan): ...", "fail = 3"), "fail is no method"),
        (GOOD_SCHEDULER.replace("only=None, ", ""), "schedule takes no parameter 'only'"),
        (GOOD_SCHEDULER.replace("def stats(self)", "def stats(self, verbose)"), "stats demands a parameter 'verbose'"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_with_what_is_wrong(
    install_distribution: InstallDistribution, source: str, fault: str
) -> None:
    install_distribution("odd-plugin", source, {"odd": "Mine"})
    with pytest.raises(PluginError, match=r"'odd' of odd-plugin 2\.1 does not fit Scheduler: ") as caught:
        load_plugin(SCHEDULERS, "odd")
    assert fault in str(caught.value)


def test_all_faults_are_told_at_once_and_optional_extras_are_none() -> None:
    class Mine:
        interface_version = INTERFACE_VERSION

        @classmethod
        def create(cls, *args: object, **kwargs: object) -> object: ...

        def add(self, sequence: object, priority: int = 0) -> None: ...

    faults = find_interface_faults(Mine, Scheduler)
    assert faults == [f"{name} is missing" for name in ("abort", "commit", "fail", "schedule", "stats")]
    assert "attend is missing" in find_interface_faults(Mine, AttentionKernels)


def test_one_name_from_two_distributions_is_refused(install_distribution: InstallDistribution) -> None:
    install_distribution("one-plugin", GOOD_SCHEDULER, {"twice": "Mine"})
    install_distribution("other-plugin", GOOD_SCHEDULER, {"twice": "Mine"})
    with pytest.raises(PluginError, match="several distributions bring the scheduler 'twice'") as caught:
        load_plugin(SCHEDULERS, "twice")
    assert "one-plugin 2.1" in str(caught.value)
    assert "other-plugin 2.1" in str(caught.value)
