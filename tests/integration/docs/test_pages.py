"""The documentation: generated tables are up to date, links work, and every room of the house is described."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "integration" / "docs"
PAGES = sorted(
    {ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "kernels").glob("*.md"), *(ROOT / "tests").rglob("*.md")}
)
TOP_FOLDERS = ("plugin", "kernels", "adapters", "integration")


def _load_updater() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_tables", Path(__file__).parent / "update_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _without_code_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)


def _anchors(page: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", _without_code_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _links(page: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code_blocks(page)):
        if not re.match(r"[a-z]+:", target):
            yield target


def _find_broken_links(path: Path, page: str) -> Iterator[str]:
    for link in _links(page):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if file and not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in _anchors(target.read_text(encoding="utf-8") if file else page):
            yield f"{link}: no such heading"


def _find_missing_paths(file: Path, page: str) -> Iterator[str]:
    """Paths of the repository in backticks that don't exist; NAME in a path is a placeholder."""
    for path in re.findall(r"`((?:plugin|kernels|adapters|integration|tests)/[\w./-]*)`", page):
        if "NAME" not in path and not any((folder / path).exists() for folder in (ROOT, file.parent)):
            yield path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_paths_exist(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert list(_find_broken_links(path, page)) == []
    assert list(_find_missing_paths(path, page)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = (
        "# A heading: `here`\n[a](#a-heading-here) [b](#gone) [c](gone.md) [d](https://example.org) `kernels/gone.py`"
    )
    assert list(_find_broken_links(tmp_path / "page.md", page)) == ["#gone: no such heading", "gone.md: no such file"]
    assert list(_find_missing_paths(tmp_path / "page.md", page)) == ["kernels/gone.py"]


def test_generated_tables_are_up_to_date() -> None:
    outdated = [path.name for path in _load_updater().find_outdated()]
    assert outdated == [], "run `python tests/integration/docs/update_tables.py`"


def test_a_changed_table_is_outdated_and_a_missing_place_is_refused() -> None:
    updater = _load_updater()
    page = "before\n<!-- generated: config -->\nold\n<!-- end -->\nafter"
    assert updater.update(page, "config", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no single place for metrics"):
        updater.update(page, "metrics", "new")


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [
        path.name for path in DOCS.glob("*.md") if path.name != "README.md" and f"]({path.name})" not in index
    ] == []


def test_architecture_names_every_room() -> None:
    page = (DOCS / "ARCHITECTURE.md").read_text(encoding="utf-8")
    headings = " ".join(re.findall(r"^## (.*)$", page, flags=re.MULTILINE))
    rooms = [
        f"{top}/{folder.name}/"
        for top in TOP_FOLDERS
        for folder in sorted((ROOT / top).iterdir())
        if folder.is_dir() and folder.name != "__pycache__" and any(path.is_file() for path in folder.rglob("*.*"))
    ]
    assert "plugin/scheduler/" in rooms
    kernels = (page.partition("## `kernels/`")[2]).partition("\n## ")[0]
    missing = [room for room in rooms if room not in headings and f"`{room.removeprefix('kernels/')}`" not in kernels]
    assert missing == []


def test_readme_is_short_and_begins_with_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 250
    first, second, *_ = re.findall(r"^(?:bash|pagedkv) \S+", readme, flags=re.MULTILINE)
    assert (first, second) == ("bash integration/quickstart.sh", "bash tests/run.sh")
