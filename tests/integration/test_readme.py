"""The code of README and of the page about plugins runs as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLUGINS = (ROOT / "integration" / "docs" / "PLUGINS.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "tests" / "integration" / "example_plugin"


def _code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", page, flags=re.DOTALL)


def test_example_plugin_is_the_one_that_is_served_with() -> None:
    assert (EXAMPLE / "pagedkv_prefix_log.py").read_text().strip() in _code_blocks(PLUGINS, "python")
    assert (EXAMPLE / "pyproject.toml").read_text().strip() in _code_blocks(PLUGINS, "toml")


def test_python_example_runs(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in _code_blocks(README, "python") if "Engine(" in block)
    exec(compile(code.replace("path/to/model", str(demo_model)), "README", "exec"), {})
    assert "Paris" in capsys.readouterr().out


def test_conformance_example_runs_as_a_test_class() -> None:
    (code,) = (block for block in _code_blocks(PLUGINS, "python") if "Conformance" in block)
    namespace: dict = {}
    exec(compile(code, "PLUGINS", "exec"), namespace)
    suite = namespace["CacheManagerConformance"]
    assert set(vars(namespace["TestMine"])) - {"__module__", "__doc__"} <= set(vars(suite)) | set(suite.__annotations__)
