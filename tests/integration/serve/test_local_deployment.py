"""`pagedkv up`: real workers of a tiny model behind a program that stands for the gateway."""

from __future__ import annotations

import json
import os
import shlex
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

from pagedkv.integration.serve import local_deployment
from pagedkv.integration.serve.child_process import command_path
from pagedkv.integration.serve.local_deployment import DeploymentOptions, DeploymentSummary, run_deployment
from pagedkv.integration.serve.own_processes import find_free_ports
from pagedkv.integration.serve.process_keeper import MAX_FAILURES, ProcessKeeper
from pagedkv.integration.serve.smg_gateway import SmgGateway
from pagedkv.plugin.config import load_config
from pagedkv.plugin.errors import UnavailableError

TIMEOUT_S = 120
GATEWAY = """#!{python}
import http.server, json, signal, socket, sys
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]
if value("--policy") == "wrong":
    sys.exit("usage: ...\\nsmg: error: argument --policy: invalid choice")
if sys.argv[-1] == "--help":
    sys.exit(0)
urls = [one for one in sys.argv[sys.argv.index("--worker-urls") + 1:] if one.startswith("grpc://")]
print("arguments", json.dumps(sys.argv[1:]), flush=True)
if "--break" in sys.argv:
    sys.exit(9)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/readiness"
        body = json.dumps({{"status": "ready", "healthy_workers": len(urls)}}).encode()
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(body if known else b"")
    def log_message(self, *_):
        pass
class Server(http.server.HTTPServer):
    address_family = socket.AF_INET6 if ":" in value("--host") else socket.AF_INET
def end(*_):
    print("gateway ends", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
Server((value("--host"), int(value("--port"))), Handler).serve_forever()
"""


WORKER = """#!{python}
import os, pathlib, signal, sys, time
folder = pathlib.Path("{folder}")
def end(*_):
    (folder / ("ended-" + str(os.getpid()))).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if (folder / "deaf").exists() else end)
(folder / ("worker-" + str(os.getpid()))).touch()
if (folder / "broken").exists():
    print("this is why", flush=True)
    sys.exit(3)
if not (folder / "slow").exists():
    os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b"{{}}\\n")
time.sleep(60)
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

    def read_gateway_arguments(self) -> list[str]:
        self.wait_for_line("gateway | arguments")
        line = next(line for line in self.log if "gateway | arguments" in line)
        return list(json.loads(line.split("arguments ", 1)[1]))


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
def test_workers_and_gateway_start_and_end_together(model: Path, gateway_program: Path, tmp_path: Path) -> None:
    """The config is one of a server for both protocols, whose addresses do not hold here."""
    config = tmp_path / "pagedkv.toml"
    config.write_text(
        f"[server]\nuds_path = '{tmp_path}/socket'\nlisten = '127.0.0.1:1'\nprotocols = ['tgi', 'smg']\n"
        "served_model_name = 'it'\n"
    )
    arguments = ("--config", str(config), "--replicas", "2", "--", "--api-key", "secret")
    with running(model, gateway_program, *arguments) as up:
        summary = up.read_summary()
        assert summary["num_replicas"] == len(summary["worker_urls"]) == 2
        assert (summary["model"], summary["needs_key"]) == ("it", True)
        assert len(summary["metrics_urls"]) == 3
        assert all(is_serving(url) for url in summary["worker_urls"])
        assert not list(tmp_path.glob("socket*"))
        assert any(line.startswith("worker 1 | ") for line in up.log)
        told = up.read_gateway_arguments()
        assert told[-2:] == ["--api-key", "secret"]
        assert told[told.index("--host") + 1] == "127.0.0.1"

        children = psutil.Process(up.process.pid).children(recursive=True)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(TIMEOUT_S) == 0
        up.wait_for_line("gateway | gateway ends")
        assert not any(child.is_running() for child in children)


def deployment(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> DeploymentOptions:
    """Two workers that are not ours, but tell that they are ready and serve nothing."""
    worker = tmp_path / "pagedkv"
    worker.write_text(WORKER.format(python=sys.executable, folder=tmp_path))
    worker.chmod(0o755)
    monkeypatch.setattr(local_deployment, "command_path", lambda: str(worker))
    (port,) = find_free_ports(1)
    config = load_config(None, {"model.device": "cpu", "server.drain_timeout_s": 30})
    gateway = SmgGateway(str(program), "127.0.0.1", port, "random", arguments)
    return DeploymentOptions(config, None, (), 2, gateway)


def worker_pids(tmp_path: Path) -> list[int]:
    return [int(file.name.partition("-")[2]) for file in tmp_path.glob("worker-*")]


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_deployment, "ProcessKeeper", lambda: ProcessKeeper(first_pause_s=0.01))


def test_what_is_killed_comes_back_and_all_end_at_a_signal(
    tmp_path: Path, gateway_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(local_deployment, "ProcessKeeper", lambda: ProcessKeeper(write=log.append))
    options = deployment(tmp_path, gateway_program, monkeypatch)

    def kill_all_once(_: object) -> None:
        for child in psutil.Process().children():
            child.kill()

        def end() -> None:
            while not {"worker 0 | is ready again", "worker 1 | is ready again"} <= set(log):
                time.sleep(0.05)
            while options.gateway.count_ready_workers() < 2:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=end, daemon=True).start()

    assert run_deployment(options, kill_all_once) == 0
    for name in ("gateway", "worker 0", "worker 1"):
        assert f"{name} | ended with code -9; it is started again in 1 s" in log
    assert len(list(tmp_path.glob("ended-*"))) == 2


def test_a_second_signal_ends_all_at_once(
    tmp_path: Path, gateway_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf").touch()

    def end_twice(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    assert run_deployment(deployment(tmp_path, gateway_program, monkeypatch), end_twice) == 1
    assert not any(psutil.pid_exists(pid) for pid in worker_pids(tmp_path))


def test_a_signal_while_workers_load_ends_them(
    tmp_path: Path, gateway_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow").touch()

    def end() -> None:
        while len(worker_pids(tmp_path)) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    options = deployment(tmp_path, gateway_program, monkeypatch)
    threading.Thread(target=end, daemon=True).start()
    assert run_deployment(options, lambda _: pytest.fail("it was not ready")) == 0
    assert not any(psutil.pid_exists(pid) for pid in worker_pids(tmp_path))


def test_nothing_is_left_where_it_is_killed(tmp_path: Path, gateway_program: Path) -> None:
    code = f"""
import pytest, test_local_deployment as tests
from pathlib import PosixPath
options = tests.deployment({tmp_path!r}, {gateway_program!r}, pytest.MonkeyPatch())
tests.run_deployment(options, lambda summary: print("ready", flush=True))
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3
        process.kill()
        _, alive = psutil.wait_procs(children, TIMEOUT_S)
        assert not alive


def test_a_worker_that_can_not_start_ends_all(
    tmp_path: Path, gateway_program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(UnavailableError, match=r"worker \d ended with code 3 before it was ready"):
        run_deployment(deployment(tmp_path, gateway_program, monkeypatch), lambda _: pytest.fail("it was not ready"))
    assert " | this is why" in capsys.readouterr().err


@pytest.mark.usefixtures("_short_pauses")
def test_one_worker_without_hope_leaves_the_other_serving_and_all_without_end_in_an_orderly_way(
    tmp_path: Path, gateway_program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = deployment(tmp_path, gateway_program, monkeypatch)
    errors: list[str] = []

    def break_one(_: object) -> None:
        (tmp_path / "broken").touch()
        first, second = sorted(worker_pids(tmp_path))
        os.kill(first, signal.SIGKILL)

        def break_other() -> None:
            while len(worker_pids(tmp_path)) < 2 + MAX_FAILURES:
                time.sleep(0.01)
            errors.extend(file.name for file in tmp_path.glob("ended-*"))
            os.kill(second, signal.SIGKILL)

        threading.Thread(target=break_other, daemon=True).start()

    with pytest.raises(UnavailableError, match=f"worker 0, worker 1: ended {MAX_FAILURES} times in a row"):
        run_deployment(options, break_one)
    assert errors == []
    assert "gateway | gateway ends" in capsys.readouterr().err


@pytest.mark.usefixtures("_short_pauses")
def test_a_gateway_without_hope_ends_the_workers_as_they_ask(
    tmp_path: Path, gateway_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = deployment(tmp_path, gateway_program, monkeypatch)

    def break_it(_: object) -> None:
        gateway_program.write_text(f"#!{sys.executable}\nraise SystemExit(9)\n")
        for child in psutil.Process().children():
            if str(gateway_program) in child.cmdline():
                child.kill()

    with pytest.raises(UnavailableError, match=f"gateway: ended {MAX_FAILURES} times in a row"):
        run_deployment(options, break_it)
    assert len(list(tmp_path.glob("ended-*"))) == 2


def test_a_gateway_that_can_not_start_ends_all(
    tmp_path: Path, gateway_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = deployment(tmp_path, gateway_program, monkeypatch, "--break")
    with pytest.raises(UnavailableError, match="gateway ended with code 9 before it was ready"):
        run_deployment(options, lambda _: pytest.fail("it was not ready"))
    assert not any(psutil.pid_exists(pid) for pid in worker_pids(tmp_path))


def test_wrong_arguments_are_refused_before_anything_starts(pagedkv, model: Path, gateway_program: Path) -> None:
    gateway = ("--gateway", gateway_program)
    outcome = pagedkv("up", model, *gateway, "--set", "server.listen=0.0.0.0:1")
    assert (outcome.code, "pagedkv up chooses it" in outcome.err) == (2, True)
    tls = ("--set", "server.tls_cert=cert.pem", "--set", "server.tls_key=key.pem")
    assert "give the gateway its certificate" in pagedkv("up", model, *gateway, *tls).err
    assert "no-such-program is no program" in pagedkv("up", model, "--gateway", "no-such-program").err
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        outcome = pagedkv("up", model, *gateway, "--port", port)
    assert (outcome.code, f"can't listen on 127.0.0.1:{port}" in outcome.err) == (2, True)
    assert "refuses its arguments: smg: error: argument --policy: invalid choice" in (
        pagedkv("up", model, *gateway, "--port", port, "--policy", "wrong").err
    )
    assert "--port for the gateway: give pagedkv up --port" in pagedkv("up", model, *gateway, "--", "--port=1").err


def test_the_line_for_curl_names_the_key_and_survives_a_shell() -> None:
    summary = DeploymentSummary("https://127.0.0.1:1/v1", True, "it's", 1, ("grpc://127.0.0.1:2",), ("http://x",))
    _, line = summary.to_text().splitlines()
    words = shlex.split(line.removeprefix("try: "))
    assert words[:2] == ["curl", "https://127.0.0.1:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    assert "authorization: Bearer KEY" in words
