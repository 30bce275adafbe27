"""Who answers: pagedkv, another model server, or nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import (
    TextGenerationServiceServicer,
    add_TextGenerationServiceServicer_to_server,
)
from pagedkv.integration.serve.launcher_shim import write_shim
from pagedkv.integration.serve.server_check import STOCK_ATTENTION, is_ours
from pagedkv.plugin.registry import KERNELS, list_entry_points


class _Other(TextGenerationServiceServicer):
    def __init__(self, attention_impl: str, may_answer: threading.Event) -> None:
        self._attention_impl = attention_impl
        self._may_answer = may_answer

    def Info(self, request: Any, context: Any) -> pb.InfoResponse:
        self._may_answer.wait()
        return pb.InfoResponse(attention_impl=self._attention_impl)


@pytest.fixture
def serve_info(tmp_path: Path) -> Callable[..., Any]:
    """A server with an Info of its own; its address."""

    @contextmanager
    def serve(attention_impl: str, *, is_stuck: bool = False) -> Iterator[str]:
        may_answer = threading.Event()
        if not is_stuck:
            may_answer.set()
        server = grpc.server(futures.ThreadPoolExecutor(1))
        add_TextGenerationServiceServicer_to_server(_Other(attention_impl, may_answer), server)
        server.add_insecure_port(f"unix:{tmp_path}/socket-0")
        server.start()
        yield f"{tmp_path}/socket-0"
        may_answer.set()
        server.stop(None).wait()

    return serve


def test_kernels_that_are_installed_and_the_contiguous_backend_s_are_ours() -> None:
    assert all(is_ours(point.name) for point in list_entry_points(KERNELS))
    assert is_ours("sdpa")
    assert not any(map(is_ours, [*STOCK_ATTENTION, ""]))


@pytest.mark.parametrize("attention_impl", [*sorted(STOCK_ATTENTION), ""])
def test_another_server_is_told_and_fails_the_check(pagedkv, serve_info, attention_impl: str) -> None:
    with serve_info(attention_impl) as target:
        outcome = pagedkv("check-server", target)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"another model server than pagedkv answers on {target}: its attention is {attention_impl!r}" in outcome.err


def test_ours_passes(pagedkv, serve_info) -> None:
    with serve_info("triton") as target:
        outcome = pagedkv("check-server", target)
    assert (outcome.code, outcome.out, outcome.err) == (0, "pagedkv, attention triton\n", "")


def test_nobody_and_somebody_who_is_stuck_are_another_exit_code(pagedkv, serve_info, tmp_path: Path) -> None:
    outcome = pagedkv("check-server", tmp_path / "nobody", "--timeout-s", "0.2")
    assert outcome.code == 1
    assert "does not answer" in outcome.err
    with serve_info("triton", is_stuck=True) as target:
        outcome = pagedkv("check-server", target, "--timeout-s", "0.2")
    assert outcome.code == 1
    assert "does not answer within 0.2 s" in outcome.err


def test_command_that_a_launcher_would_start_is_checked_before_it_starts(
    pagedkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    stock.mkdir()
    (stock / "text-generation-server").write_text("#!/bin/sh\n")
    (stock / "text-generation-server").chmod(0o755)
    shim = write_shim(ours, "python")
    monkeypatch.setenv("PATH", f"{stock}:{ours}")
    outcome = pagedkv("check-server", "--command")
    assert outcome.code == 2
    assert f"{stock}/text-generation-server is the text-generation-server" in outcome.err
    monkeypatch.setenv("PATH", f"{ours}:{stock}")
    assert pagedkv("check-server", "--command").out == f"{shim}\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no text-generation-server is on PATH" in pagedkv("check-server", "--command").err
