"""The SMG gateway as a program on this machine: where it is, how it is started, when it is ready."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sysconfig
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedkv.plugin.errors import ConfigError

LOOPBACK = "127.0.0.1"
_REACHABLE = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104 - compared, not bound
"""Where an address is called that stands for all of a machine's."""
_OWN_FLAGS = {
    "--host": "give pagedkv up --host",
    "--port": "give pagedkv up --port",
    "--policy": "give pagedkv up --policy",
    "--shutdown-grace-period-secs": "set server.drain_timeout_s, for gateway and workers",
    "--worker-urls": "pagedkv up starts the workers",
    "--prometheus-host": "pagedkv up chooses it and tells the URL",
    "--prometheus-port": "pagedkv up chooses it and tells the URL",
}
"""Flags that are chosen here, and what to do instead of giving them."""
_CHECK_TIMEOUT_S = 60.0
_GET_TIMEOUT_S = 5.0


def find_gateway_program(named: str | None) -> str:
    """The path of `smg`: as named, else beside this Python, else on the PATH. Raises ConfigError."""
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise ConfigError(f"--gateway: {named} is no program")
        return found
    beside = Path(sysconfig.get_path("scripts"), "smg")
    program = str(beside) if beside.exists() else shutil.which("smg")
    if program is None:
        raise ConfigError(
            "the SMG gateway is not installed: pip install 'pagedkv[gateway]', or install smg in an environment of its "
            "own and name its program with --gateway"
        )
    return program


@dataclass(frozen=True, slots=True)
class SmgGateway:
    """A gateway that is to be started.

    Args:
        program: path of `smg`.
        host: IP address or name to listen on.
        arguments: appended to `smg launch`.
    """

    program: str
    host: str
    port: int
    policy: str
    arguments: Sequence[str]

    @property
    def url(self) -> str:
        """Where it is called, from this machine where it listens on all addresses."""
        host = _REACHABLE.get(self.host, self.host)
        scheme = "https" if self._has_flag("--tls-cert-path") else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def needs_key(self) -> bool:
        """Whether clients have to send a key."""
        return self._has_flag("--api-key") or self._has_flag("--tenant-api-key")

    def check(self) -> None:
        """Raises ConfigError where arguments are wrong, or the port is in use."""
        for flag, remedy in _OWN_FLAGS.items():
            if self._has_flag(flag):
                raise ConfigError(f"{flag} for the gateway: {remedy}")
        self._refuse_port_in_use()
        # Asked for help at last, it checks what stands before.
        command = [self.program, "launch", "--policy", self.policy, *self.arguments, "--help"]
        try:
            outcome = subprocess.run(  # noqa: S603 - the program that is started later
                command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=_CHECK_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{self.program} can't be run as the gateway: {error}") from None
        if outcome.returncode:
            lines = outcome.stderr.decode(errors="replace").strip().splitlines() or ["it does not say why"]
            raise ConfigError(f"{self.program} refuses its arguments: {lines[-1]}")

    def make_command(self, worker_urls: Sequence[str], metrics_port: int, drain_timeout_s: float) -> list[str]:
        """The command that starts it. It lets running answers finish for `drain_timeout_s` when it is asked to end."""
        command = [self.program, "launch", "--host", self._resolve()[1], "--port", str(self.port)]
        command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)]
        command += ["--worker-urls", *worker_urls, "--policy", self.policy]
        command += ["--worker-startup-check-interval", "1", "--log-level", "warn"]
        command += ["--shutdown-grace-period-secs", str(max(1, round(drain_timeout_s)))]
        return [*command, *self.arguments]

    @staticmethod
    def make_environment() -> dict[str, str]:
        return _environment()

    def count_ready_workers(self) -> int:
        """Number of workers that it has registered and finds healthy; 0 while it does not answer."""
        # Needs no key, other than its list of workers.
        try:
            with _OPENER.open(f"{self.url}/readiness", timeout=_GET_TIMEOUT_S) as response:
                answer = json.load(response)
        except (OSError, http.client.HTTPException, ValueError):
            return 0
        count = answer.get("healthy_workers") if isinstance(answer, dict) else None
        return count if isinstance(count, int) else 0

    def _has_flag(self, flag: str) -> bool:
        return any(argument.partition("=")[0] == flag for argument in self.arguments)

    def _refuse_port_in_use(self) -> None:
        try:
            family, address = self._resolve()
            socket.create_server((address, self.port), family=family).close()
        except OSError as error:
            raise ConfigError(
                f"can't listen on {self.host}:{self.port}: {error.strerror}; choose others with --host, --port"
            ) from None

    def _resolve(self) -> tuple[socket.AddressFamily, str]:
        """The IP address of its host: it takes no names. Raises OSError."""
        family, _, _, _, address = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0]
        return family, str(address[0])


def _environment() -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # It finds its workers on this machine, never through a proxy.
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOOPBACK]))
    return environ | {"NO_PROXY": no_proxy, "no_proxy": no_proxy}


def _make_opener() -> urllib.request.OpenerDirector:
    """For calls to this machine: never through a proxy, and a certificate for other names is no matter."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


_OPENER = _make_opener()
