"""Server processes started as the launcher of text-generation-inference starts its shards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.integration.serve.launcher_shim import write_shim

LAUNCHER_ENVIRONMENT = {
    "CUDA_MEMORY_FRACTION": "1.0",
    "MAX_TOTAL_TOKENS": "2048",
    "MAX_BATCH_SIZE": "16",
    "CUDA_GRAPHS": "0",
    "REQUEST_LOGPROBS": "1",
}
CONFIG_FILE = """
[model]
dtype = "float32"
device = "cpu"

[cache]
num_blocks = 192

[scheduler]
max_step_tokens = 512
"""
CALL_TIMEOUT_S = 60


@dataclass
class Shard:
    """A server process as the launcher sees it."""

    process: subprocess.Popen[str]
    socket_path: Path
    errors: Path
    """Its standard error."""
    lines: list[str]
    """Its standard output so far."""
    channel: grpc.Channel
    stub: Any

    def call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return getattr(self.stub, method)(request, timeout=timeout_s)

    def replay(self, call: dict[str, Any]) -> Any:
        request = json_format.ParseDict(call["request"], getattr(pb, f"{call['method']}Request")())
        return self.call(call["method"], request)

    def prefill(self, request_id: int, text: str, max_new_tokens: int) -> Any:
        request = make_request(request_id, text, max_new_tokens)
        return self.call("Prefill", pb.PrefillRequest(batch=pb.Batch(id=request_id, requests=[request], size=1)))

    def health_fault(self) -> str:
        try:
            self.call("Health", pb.HealthRequest())
        except grpc.RpcError as error:
            return str(error.details())
        return ""

    def code_of(self, call: Callable[[], object]) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        return caught.value.code()


def make_request(request_id: int, text: str, max_new_tokens: int) -> pb.Request:
    return pb.Request(
        id=request_id,
        inputs=text,
        truncate=16384,
        add_special_tokens=True,
        parameters=pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=max_new_tokens, ignore_eos_token=True),
    )


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shim(tmp_path_factory.mktemp("shim"), sys.executable)


@pytest.fixture(scope="session")
def new_request() -> Callable[[int, str, int], pb.Request]:
    """A greedy request for (id, text, max_new_tokens) that only ends there."""
    return make_request


@pytest.fixture(scope="session")
def launched(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Starts shards with the launcher's arguments and environment, and waits for their sockets as it does.

    Takes the model's directory and, for each shard, variables besides the launcher's.
    """

    @contextmanager
    def launch(model: Path, *variables: dict[str, str]) -> Iterator[list[Shard]]:
        folder = tmp_path_factory.mktemp("shards")
        (folder / "pagedkv.toml").write_text(CONFIG_FILE)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        with ExitStack() as stack:
            starts = [
                _start(stack, [shim, "serve", str(model)], folder, rank, len(variables), port, own)
                for rank, own in enumerate(variables)
            ]
            yield [_connect(stack, *start) for start in starts]

    return launch


def _start(
    stack: ExitStack,
    command: Sequence[object],
    folder: Path,
    rank: int,
    num_shards: int,
    port: int,
    variables: dict[str, str],
) -> tuple[subprocess.Popen[str], Path, Path, list[str]]:
    """Returns the process, its socket-to-be, its standard error and the lines of its standard output."""
    flags = ["--uds-path", folder / "tgi", "--logger-level", "INFO", "--json-output"]
    shard = {"RANK": str(rank), "WORLD_SIZE": str(num_shards), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    config = {"PAGEDKV_CONFIG": str(folder / "pagedkv.toml")}
    errors = folder / f"stderr-{rank}"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [*command, *flags, *(["--sharded"] if num_shards > 1 else []), "--otlp-service-name", "tgi.server"],
            env={**os.environ, **LAUNCHER_ENVIRONMENT, **shard, **config, **variables},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    for end in (process.stdout.close, reader.join, process.wait, process.kill):
        stack.callback(end)
    return process, folder / f"tgi-{rank}", errors, lines


def _connect(
    stack: ExitStack, process: subprocess.Popen[str], socket_path: Path, errors: Path, lines: list[str]
) -> Shard:
    while not socket_path.exists():
        assert process.poll() is None, errors.read_text()
        time.sleep(0.05)
    channel = stack.enter_context(grpc.insecure_channel(f"unix:{socket_path}"))
    grpc.channel_ready_future(channel).result(CALL_TIMEOUT_S)
    return Shard(process, socket_path, errors, lines, channel, TextGenerationServiceStub(channel))


@pytest.fixture(scope="session")
def tiny_model(save_tiny_llama: Callable[..., Path]) -> Path:
    return save_tiny_llama(max_position_embeddings=16384)
