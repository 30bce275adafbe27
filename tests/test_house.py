"""The house itself: what is packaged, what is registered, and that no folder shadows another library."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import pagedkv.kernels
from pagedkv.integration.serve.child_process import command_path
from pagedkv.plugin.features import INTERFACE_VERSION
from pagedkv.plugin.registry import GROUPS, load_entry_point

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("plugin", "kernels", "adapters", "integration")
BUILD_INPUTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
OF_A_CLONE_ALONE = {".sh", ".md"}
"""Scripts that install, and notes for who reads the source: the wheel does without."""
FIGURES_OF_NOTES = ROOT / "integration" / "docs"
"""Guides for operators and the pictures that they show: the wheel does without, too."""

OUR_KERNELS = Path(pagedkv.kernels.__file__).parent
REPORT = """
import atexit, importlib.util, json, os
def report():
    spec = importlib.util.find_spec("kernels")
    with open(os.environ["REPORT_FILE"], "w") as file:
        json.dump(list(spec.submodule_search_locations or []) if spec else [], file)
atexit.register(report)
"""


def _find_kernels_in(command: list[str], folder: Path, **environ: str) -> list[Path]:
    """Runs a command in the repository's root and says where it would import `kernels` from."""
    (folder / "sitecustomize.py").write_text(REPORT)
    report = folder / "report.json"
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    variables = {**inherited, "PYTHONPATH": str(folder), "REPORT_FILE": str(report), **environ}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True)
    return [Path(place).resolve() for place in json.loads(report.read_text())]


def test_kernels_of_hugging_face_are_not_shadowed_in_tests() -> None:
    spec = importlib.util.find_spec("kernels")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or []]
    assert OUR_KERNELS not in places, "run the tests by tests/run.sh, or with PYTHONSAFEPATH=1"


def test_kernels_of_hugging_face_are_not_shadowed_by_the_command(tmp_path: Path) -> None:
    assert OUR_KERNELS not in _find_kernels_in([command_path(), "--help"], tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no PYTHONSAFEPATH")
def test_safe_path_keeps_kernels_of_hugging_face_visible(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ""]
    assert OUR_KERNELS not in _find_kernels_in(command, tmp_path, PYTHONSAFEPATH="1")
    assert OUR_KERNELS in _find_kernels_in(command, tmp_path), "the trap is gone: nothing needs to guard against it"


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the wheel that is built from a copy of the source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILD_INPUTS:
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = out.glob("pagedkv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_module_and_data_file(wheel_names: set[str]) -> None:
    expected = {
        f"pagedkv/{path.relative_to(ROOT).as_posix()}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if path.suffix not in OF_A_CLONE_ALONE or "deploy" in path.parts
        if FIGURES_OF_NOTES not in path.parents
    }
    assert {name for name in wheel_names if name.startswith("pagedkv/")} == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_says_that_it_is_typed(wheel_names: set[str], package: str) -> None:
    assert f"pagedkv/{package}/py.typed" in wheel_names


def test_wheel_holds_the_licence(wheel_names: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, point.name) for group in GROUPS for point in entry_points(group=group.name)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_registered_plugin_loads_and_fits_its_interface(group, name: str) -> None:
    (point,) = entry_points(group=group.name, name=name)
    assert load_entry_point(group, point).interface_version == INTERFACE_VERSION


def test_every_group_has_a_plugin_of_ours() -> None:
    ours = {group.name for group in GROUPS for point in entry_points(group=group.name) if point.dist.name == "pagedkv"}
    assert ours == {group.name for group in GROUPS}
