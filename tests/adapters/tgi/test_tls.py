"""TLS and mutual TLS on TCP, with certificates made for the test."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from pagedkv.adapters.rpc.tls import ClientTls
from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.client import GenerationClient
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.adapters.tgi.server import GenerationServer
from pagedkv.integration.cli.main import app
from pagedkv.plugin.config import ServerSection, parse_config
from pagedkv.plugin.errors import ConfigError, UnavailableError
from pagedkv.plugin.requests import SamplingParams

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


class Authority:
    """Signs certificates for one name each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._run("req", "-x509", *self._new_key("ca"), "-out", "ca.pem", "-subj", "/CN=test-ca")

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key, for localhost and 127.0.0.1 too."""
        self._run("req", "-new", *self._new_key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self._folder / "names").write_text("subjectAltName = DNS:localhost, IP:127.0.0.1\n")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        self._run("x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.pem")
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"

    def _new_key(self, name: str) -> tuple[str, ...]:
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("certificates")
    ours, others = Authority(folder / "ours"), Authority(folder / "others")
    return SimpleNamespace(
        ca=ours.ca,
        server=ours.issue("server"),
        client=ours.issue("client"),
        second_client=ours.issue("second"),
        other_ca=others.ca,
        other_client=others.issue("stranger"),
    )


@pytest.fixture
def listening(
    serving: Callable[..., Any], backend: Any, make_tokenizer: Any, certificates: SimpleNamespace, tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """`with listening(**keys) as target:` is a server with TLS on TCP."""

    def listen(**keys: str) -> Any:
        cert, key = certificates.server
        options = {"listen": "localhost:0", "tls_cert": str(cert), "tls_key": str(key), **keys}
        return serving(backend, make_tokenizer(), tmp_path, **options)

    return listen


def ask(target: str, tls: ClientTls | None) -> str:
    """The answer to "a" through our own client."""

    async def run() -> str:
        async with (
            GenerationClient(target, tls=tls) as client,
            aclosing(client.generate("a", SamplingParams(max_new_tokens=3))) as tokens,
        ):
            return "".join([token.text async for token in tokens])

    return asyncio.run(run())


class TestTls:
    def test_a_client_that_knows_the_authority_is_answered(self, listening, certificates):
        with listening() as served:
            assert ask(served.server.tcp_address, ClientTls(ca=certificates.ca)) == "bcd"

    def test_a_client_in_the_clear_and_one_that_knows_another_authority_get_nothing(self, listening, certificates):
        with listening() as served:
            for tls in (None, ClientTls(), ClientTls(ca=certificates.other_ca)):
                with pytest.raises(UnavailableError):
                    ask(served.server.tcp_address, tls)
            assert not served.backend.requests

    def test_the_command_line_takes_the_authority_s_file(self, listening, certificates):
        with listening() as served:
            arguments = ["generate", "a", "--max-new-tokens", "3", "--target", served.server.tcp_address]
            for option, code in ((["--tls-ca", str(certificates.ca)], 0), (["--tls"], 1), ([], 1)):
                outcome = CliRunner().invoke(app, [*arguments, *option])
                assert outcome.exit_code == code, outcome.output
                assert ("bcd" in outcome.output) == (code == 0)

    def test_the_unix_socket_stays_as_it_is(self, listening):
        with listening() as served:
            served.wire.health()


class TestMutualTls:
    def test_a_client_with_a_certificate_is_answered(self, listening, certificates):
        cert, key = certificates.client
        with listening(tls_client_ca=str(certificates.ca)) as served:
            assert ask(served.server.tcp_address, ClientTls(certificates.ca, cert, key)) == "bcd"

    def test_a_client_without_a_certificate_or_with_a_stranger_s_gets_nothing(self, listening, certificates):
        with listening(tls_client_ca=str(certificates.ca)) as served:
            for tls in (ClientTls(certificates.ca), ClientTls(certificates.ca, *certificates.other_client)):
                with pytest.raises(UnavailableError):
                    ask(served.server.tcp_address, tls)
            assert not served.backend.requests


class TestFiles:
    @pytest.mark.parametrize("key", ["tls_cert", "tls_key", "tls_client_ca"])
    def test_a_file_that_is_missing_or_no_pem_is_named_at_start(
        self, backend, make_tokenizer, certificates, serving, tmp_path, key
    ):
        (tmp_path / "broken.pem").write_text("no certificate")
        cert, private = certificates.server
        paths = {"tls_cert": str(cert), "tls_key": str(private), "tls_client_ca": str(certificates.ca)}
        with serving(backend, make_tokenizer(), tmp_path) as served:
            for name in ("missing.pem", "broken.pem"):
                config = ServerSection(**{"listen": "localhost:0", **paths, key: str(tmp_path / name)})
                server = GenerationServer(backend, make_tokenizer(), config)
                with pytest.raises(ConfigError, match=name):
                    served.call(server.start())

    def test_a_key_of_another_certificate_is_refused(self, certificates):
        with pytest.raises(ConfigError, match="stranger"):
            asyncio.run(_connect(ClientTls(certificates.ca, certificates.other_client[0], certificates.client[1])))

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"tls_cert": "c"}, "tls_cert and tls_key belong together"),
            ({"tls_client_ca": "c"}, "needs tls_cert and tls_key"),
            ({"tls_cert": "c", "tls_key": "k"}, "set listen"),
        ],
    )
    def test_half_a_configuration_is_refused(self, keys, message):
        with pytest.raises(ConfigError, match=message):
            parse_config({"server": keys})

    def test_half_a_client_s_certificate_is_refused(self):
        with pytest.raises(ConfigError, match="belong together"):
            ClientTls(cert=Path("c"))


async def _connect(tls: ClientTls) -> None:
    GenerationClient("localhost:1", tls=tls)


def test_one_certificate_s_batch_does_not_exist_for_another(listening, certificates):
    def connect(address: str, pair: tuple[Path, Path]) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(
            certificates.ca.read_bytes(), pair[1].read_bytes(), pair[0].read_bytes()
        )
        return grpc.secure_channel(address, credentials)

    with listening(tls_client_ca=str(certificates.ca)) as served:
        address = served.server.tcp_address
        with connect(address, certificates.client) as ours, connect(address, certificates.second_client) as theirs:
            batch = pb.Batch(id=1, requests=[served.wire.request(1, "a", 9)], size=1)
            TextGenerationServiceStub(ours).Prefill(pb.PrefillRequest(batch=batch), timeout=20)
            decode = pb.DecodeRequest(batches=[pb.CachedBatch(id=1)])
            with pytest.raises(grpc.RpcError) as caught:
                TextGenerationServiceStub(theirs).Decode(decode, timeout=20)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert len(TextGenerationServiceStub(ours).Decode(decode, timeout=20).generations) == 1
