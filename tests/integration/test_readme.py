"""What README shows is what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagedkv.integration.cli.config import markdown_table
from pagedkv.integration.cli.main import app
from pagedkv.plugin.config import list_config_keys
from pagedkv.plugin.registry import GROUPS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "tests" / "integration" / "example_plugin"


def _code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", README, flags=re.DOTALL)


def test_table_of_config_keys_is_the_generated_one() -> None:
    assert markdown_table(list_config_keys()) in README, "put the output of `pagedkv config --markdown` into README"


def test_example_plugin_is_the_one_that_is_served_with() -> None:
    assert (EXAMPLE / "pagedkv_prefix_log.py").read_text().strip() in _code_blocks("python")
    assert (EXAMPLE / "pyproject.toml").read_text().strip() in _code_blocks("toml")


def test_every_command_and_every_group_is_named() -> None:
    commands = [command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    assert [name for name in commands if f"`pagedkv {name}" not in README] == []
    assert [group.name for group in GROUPS if f"`{group.name}`" not in README] == []


def test_python_example_runs(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in _code_blocks("python") if "Engine(" in block)
    exec(compile(code.replace("path/to/model", str(demo_model)), "README", "exec"), {})
    assert "Paris" in capsys.readouterr().out


def test_conformance_example_runs_as_a_test_class() -> None:
    (code,) = (block for block in _code_blocks("python") if "Conformance" in block)
    namespace: dict = {}
    exec(compile(code, "README", "exec"), namespace)
    suite = namespace["CacheManagerConformance"]
    assert set(vars(namespace["TestMine"])) - {"__module__", "__doc__"} <= set(vars(suite)) | set(suite.__annotations__)
