"""Unix sockets and addresses of a server."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from pagedkv.plugin.errors import ConfigError

_MAX_UNIX_PATH_BYTES = 107


def shard_path(uds_path: str, rank: int) -> str:
    """The socket path of one shard, PATH-RANK, as routers expect it."""
    return f"{uds_path}-{rank}"


def claim_socket_path(path: str) -> None:
    """Makes sure that a server can bind `path`. Removes a socket that a dead server left there.

    Raises:
        ConfigError: a live server listens there, the path is not a socket, its folder is missing, or it is too long.
    """
    if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
        raise ConfigError(f"the socket's path {path} is longer than {_MAX_UNIX_PATH_BYTES} bytes; choose a shorter one")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ConfigError(f"the folder of the socket {path} does not exist; make it first")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket; remove it, or choose another path")
    if _has_listener(path):
        raise ConfigError(f"another server listens on {path}; stop it, or choose another path")
    os.unlink(path)


def _has_listener(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError as error:
            raise ConfigError(f"can't tell whether a server listens on {path}: {error.strerror}") from error
    return True


@contextmanager
def owner_only_files() -> Iterator[None]:
    """Sets the umask so that new files are accessible to this process's user only. Applies to the whole process."""
    previous = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(previous)


def parse_listen_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT; an IPv6 host stands in brackets. Raises ConfigError."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the address {address!r} is not HOST:PORT")
    return host, int(port)
