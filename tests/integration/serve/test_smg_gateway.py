"""The gateway's program: found, checked, and called where it listens."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagedkv.integration.serve.own_processes import find_free_ports
from pagedkv.integration.serve.smg_gateway import SmgGateway, find_gateway_program
from pagedkv.plugin.errors import ConfigError


def gateway(host: str = "127.0.0.1", port: int = 1, arguments: Sequence[str] = ()) -> SmgGateway:
    return SmgGateway("smg", host, port, "random", arguments)


@contextmanager
def answering(body: bytes) -> Iterator[int]:
    """A server on loopback that answers everything so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_without_the_gateway_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'pagedkv\[gateway\]'"):
        find_gateway_program(None)
    (tmp_path / "smg").touch(0o755)
    assert find_gateway_program(None) == str(tmp_path / "smg")


@pytest.mark.parametrize(
    ("host", "arguments", "url"),
    [
        ("127.0.0.1", (), "http://127.0.0.1:1"),
        ("0.0.0.0", (), "http://127.0.0.1:1"),
        ("::", (), "http://[::1]:1"),
        ("::1", ("--tls-cert-path=cert.pem",), "https://[::1]:1"),
        ("localhost", ("--tls-cert-path", "cert.pem"), "https://localhost:1"),
    ],
)
def test_it_is_called_where_it_listens(host: str, arguments: Sequence[str], url: str) -> None:
    assert gateway(host, arguments=arguments).url == url


def test_it_is_given_an_address_where_the_user_gives_a_name() -> None:
    command = gateway("localhost").make_command(["grpc://127.0.0.1:2"], 3, 0.2)
    assert command[command.index("--host") + 1] in ("127.0.0.1", "::1")
    assert command[command.index("--shutdown-grace-period-secs") + 1] == "1"


def test_addresses_that_are_not_here_and_programs_that_do_not_run_are_refused(tmp_path: Path) -> None:
    (port,) = find_free_ports(1)
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1:"):
        gateway("192.0.2.1", port).check()
    with pytest.raises(ConfigError, match=r"can't listen on no-such-host\.invalid:"):
        gateway("no-such-host.invalid", port).check()
    program = tmp_path / "smg"
    program.touch(0o755)
    with pytest.raises(ConfigError, match="can't be run as the gateway"):
        SmgGateway(str(program), "127.0.0.1", port, "random", ()).check()


def test_workers_are_counted_by_what_it_says_of_its_readiness() -> None:
    def count(answer: bytes) -> int:
        with answering(answer) as port:
            return gateway(port=port).count_ready_workers()

    head = b"HTTP/1.0 200 OK\r\n\r\n"
    assert count(head + json.dumps({"status": "ready", "healthy_workers": 2}).encode()) == 2
    assert count(b"HTTP/1.0 503 Service Unavailable\r\n\r\n{}") == 0
    assert count(head + b"{}") == count(head + b"[]") == count(head + b"no JSON") == count(b"no HTTP\r\n\r\n") == 0
    assert gateway(port=find_free_ports(1)[0]).count_ready_workers() == 0
