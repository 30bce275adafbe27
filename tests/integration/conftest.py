"""A real server process, and the command line in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagedkv.integration.cli.main import run
from pagedkv.integration.progress_bars import HIDING_VARIABLES
from pagedkv.integration.serve.child_process import ChildServer, child_server

SMALL_CACHE = ("cache.num_blocks=256", "limits.max_total_tokens=2048", "scheduler.max_step_tokens=256")
"""4096 tokens, and steps that are warmed up in a moment."""

LaunchServer = Callable[..., AbstractContextManager[ChildServer]]


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def pagedkv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs the command as the console script does."""

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["pagedkv", *map(str, arguments)])
        monkeypatch.setenv("PAGEDKV_METRICS_LISTEN", "127.0.0.1:0")  # Tests run beside each other.
        for name in HIDING_VARIABLES:  # What the command sets is undone after the test.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        # serve sets up logging for its process, which here is the tests'.
        monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def launch_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LaunchServer:
    """Starts a server of the demo model with a small cache; arguments go to `pagedkv serve`."""

    def launch(
        *arguments: str, environ: dict[str, str] | None = None, uds_path: bool = True
    ) -> AbstractContextManager[ChildServer]:
        folder = tmp_path_factory.mktemp("server")
        settings = [part for setting in SMALL_CACHE for part in ("--set", setting)]
        socket = ["--uds-path", str(folder / "socket")] if uds_path else []
        command = [str(demo_model), *socket, *settings, *arguments]
        return child_server(command, folder / "log", environ=environ)

    return launch


@pytest.fixture(scope="session")
def server(launch_server: LaunchServer) -> Iterator[ChildServer]:
    """One server with the paged backend that tests share; nobody stops it."""
    with launch_server() as launched:
        yield launched
