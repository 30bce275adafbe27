"""TLS of servers and clients, from PEM files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagedkv.plugin.config import ServerSection
from pagedkv.plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Certificates with which a client verifies a server and, if the server asks for it, authenticates itself.

    Raises:
        ConfigError: a certificate without its key, or a key without its certificate.
    """

    ca: Path | None = None
    """Authorities that sign the server's certificate; None uses the root certificates that come with gRPC."""
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("a client's certificate and its key belong together: give both, or none")


def read_client_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Reads a client's PEM files. Raises ConfigError for a file that can't be read or is no PEM file of its kind."""
    if tls.cert is not None and tls.key is not None:
        _check_pair(tls.cert, tls.key)
    return grpc.ssl_channel_credentials(
        root_certificates=None if tls.ca is None else _read_authorities(tls.ca),
        private_key=None if tls.key is None else tls.key.read_bytes(),
        certificate_chain=None if tls.cert is None else tls.cert.read_bytes(),
    )


def read_server_credentials(config: ServerSection) -> grpc.ServerCredentials | None:
    """Reads a server's PEM files; None if TLS is off.

    Raises:
        ConfigError: a file can't be read or is no PEM file of its kind.
    """
    if not config.tls_cert:
        return None
    cert, key = Path(config.tls_cert), Path(config.tls_key)
    _check_pair(cert, key)
    authorities = _read_authorities(Path(config.tls_client_ca)) if config.tls_client_ca else None
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())],
        root_certificates=authorities,
        require_client_auth=authorities is not None,
    )


def _check_pair(cert: Path, key: Path) -> None:
    """Raises ConfigError for a bad pair. gRPC accepts any bytes, and then drops every connection without a message."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{cert} and {key} are no certificate and its unencrypted key in PEM: {error}") from error


def _read_authorities(file: Path) -> bytes:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} holds no certificates in PEM: {error}") from error
