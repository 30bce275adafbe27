"""`pagedkv up`: real workers of a tiny model behind a program that stands for the gateway."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedkv.integration.serve.child_process import command_path
from pagedkv.integration.serve.local_deployment import find_gateway_program, share_memory, share_threads
from pagedkv.integration.serve.own_processes import find_free_ports
from pagedkv.plugin.config import load_config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.threads import choose_threads

TIMEOUT_S = 120
GATEWAY = """#!{python}
import http.server, json, signal, sys
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]
start = sys.argv.index("--worker-urls") + 1
urls = [one for one in sys.argv[start:] if one.startswith("grpc://")]
print("arguments", json.dumps(sys.argv[1:]), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"workers": [{{"url": url}} for url in urls]}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
def end(*_):
    print("gateway ends", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
http.server.HTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
"""


@pytest.fixture
def gateway_program(tmp_path: Path) -> Path:
    program = tmp_path / "smg"
    program.write_text(GATEWAY.format(python=sys.executable))
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def model(save_tiny_llama: Callable[..., Path]) -> Path:
    return save_tiny_llama()


class Up:
    """A running `pagedkv up` and its outputs."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        self.log.extend(iter(self.process.stderr.readline, ""))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream
            stream.close()

    def read_summary(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "".join(self.log)
        return json.loads(line)

    def wait_for_line(self, text: str, number: int = 1) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while sum(text in line for line in list(self.log)) < number:
            assert time.monotonic() < deadline_s, "".join(self.log)
            time.sleep(0.05)

    def children(self) -> dict[int, psutil.Process]:
        """Workers by the port they listen on."""
        return {
            int(command[command.index("--listen") + 1].rpartition(":")[2]): child
            for child in psutil.Process(self.process.pid).children()
            if "--listen" in (command := child.cmdline())
        }


@contextmanager
def running(model: Path, gateway: Path, *arguments: str) -> Iterator[Up]:
    (port,) = find_free_ports(1)
    settings = ["--set", "cache.num_blocks=64", "--set", "limits.max_total_tokens=512"]
    command = [command_path(), "up", str(model), "--gateway", str(gateway), "--port", str(port), "--json"]
    up = Up([*command, *settings, *arguments])
    try:
        yield up
    finally:
        up.close()


def is_serving(url: str) -> bool:
    with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
def test_workers_and_gateway_start_come_back_and_end_together(model: Path, gateway_program: Path) -> None:
    with running(model, gateway_program, "--replicas", "2", "--", "--api-key", "secret") as up:
        summary = up.read_summary()
        assert summary["num_replicas"] == len(summary["worker_urls"]) == 2
        assert summary["model"] == model.name
        assert len(summary["metrics_urls"]) == 3
        assert all(is_serving(url) for url in summary["worker_urls"])
        up.wait_for_line("gateway | arguments")
        told = json.loads(next(line for line in up.log if "arguments" in line).split("arguments ", 1)[1])
        assert told[-2:] == ["--api-key", "secret"]
        assert told[told.index("--host") + 1] == "127.0.0.1"
        assert any(line.startswith("worker 1 | ") for line in up.log)

        victim_url = summary["worker_urls"][0]
        up.children()[int(victim_url.rpartition(":")[2])].kill()
        up.wait_for_line("worker 0 | ended with code -9; it is started again in 1 s")
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_serving(victim_url):
            assert time.monotonic() < deadline_s, "".join(up.log)
            time.sleep(0.1)

        children = psutil.Process(up.process.pid).children(recursive=True)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(TIMEOUT_S) == 0
        up.wait_for_line("gateway | gateway ends")
        assert not any(child.is_running() for child in children)


def test_a_worker_that_can_not_start_ends_all_with_the_reason_in_the_log(model: Path, gateway_program: Path) -> None:
    with running(model, gateway_program, "--set", "limits.max_total_tokens=999999") as up:
        assert up.process.wait(TIMEOUT_S) == 2
        up.wait_for_line("worker | pagedkv: limits.max_total_tokens is 999999")
        up.wait_for_line("pagedkv: worker ended with code 2 before it was ready")


def test_wrong_arguments_are_refused_before_anything_starts(pagedkv, model: Path, gateway_program: Path) -> None:
    gateway = ("--gateway", gateway_program)
    outcome = pagedkv("up", model, *gateway, "--set", "server.listen=0.0.0.0:1")
    assert (outcome.code, "pagedkv up chooses it" in outcome.err) == (2, True)
    assert "no-such-program is no program" in pagedkv("up", model, "--gateway", "no-such-program").err
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        outcome = pagedkv("up", model, *gateway, "--port", port)
    assert (outcome.code, f"can't listen on 127.0.0.1:{port}" in outcome.err) == (2, True)


def test_without_the_gateway_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'pagedkv\[gateway\]'"):
        find_gateway_program(None)
    (tmp_path / "smg").touch(0o755)
    assert find_gateway_program(None) == str(tmp_path / "smg")


def test_replicas_on_one_device_share_the_memory_that_one_would_take() -> None:
    def shares(num_replicas: int, **overrides: object) -> dict[str, Any]:
        values = {"model.device": "cpu", **{name.replace("__", "."): value for name, value in overrides.items()}}
        return share_memory(load_config(None, values, {}), num_replicas)

    assert shares(1) == {}
    assert shares(3, cache__memory_fraction=0.6) == {"cache.memory_fraction": pytest.approx(0.2)}
    assert shares(3, cache__memory="1GiB") == shares(3, cache__num_blocks=100) == {}


def test_replicas_share_the_threads_that_one_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    num_threads = choose_threads("auto").num_threads
    assert share_threads(load_config(), 1) == {}
    assert share_threads(load_config(), num_threads + 1) == {"model.threads": 1}
    assert share_threads(load_config(None, {"model.threads": 3}), 2) == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share_threads(load_config(), 2) == {}
