"""The plugin of PLUGINS.md, as a distribution of its own: installed, found by its entry point, served with."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.integration.stream_answer import StreamSummary, TextPrinter, stream
from pagedkv.plugin.requests import SamplingParams

SOURCE = Path(__file__).parent / "example_plugin"
PROMPT = "Blocks are found again by the names of their tokens. " * 8


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin's distribution installed."""
    target, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    for file in SOURCE.glob("*.*"):
        (source / file.name).write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


def test_a_server_runs_the_cache_manager_of_another_distribution(launch_server, site: Path) -> None:
    async def ask(target: str) -> StreamSummary:
        return await stream(target, PROMPT, SamplingParams(max_new_tokens=2), TextPrinter())

    with launch_server("--set", "cache.manager=prefix-log", environ={"PYTHONPATH": str(site)}) as server:
        answers = [asyncio.run(ask(server.target)) for _ in range(2)]
        log = server.log.read_text()
    found = [int(tokens) for tokens in re.findall(r"pagedkv\.prefix_log: .* (\d+) tokens found in the cache", log)]
    assert found == [0, answers[1].num_cached_tokens]
    assert found[1] >= 64
