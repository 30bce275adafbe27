"""`text-generation-server` as the launcher of text-generation-inference starts and ends it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf import json_format
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.integration.cli.install_launcher_shim import write_shim
from pagedkv.integration.text_generation_server import ServeFlags, configure, read_shard
from pagedkv.integration.weights import ensure_weights
from pagedkv.plugin.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
TRACES = ("01_greedy_single", "04_filter_batch", "06b_stop_multi_token")
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
FLAGS = ServeFlags(model_id="some/model", uds_path="socket")
CALL_TIMEOUT_S = 60
NUM_RUNNING = 10


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shim(tmp_path_factory.mktemp("shim"), sys.executable)


class TestConfig:
    def test_flags_become_keys(self) -> None:
        flags = replace(
            FLAGS,
            dtype="bfloat16",
            kv_cache_dtype="fp8_e4m3fn",
            trust_remote_code=True,
            revision="v1",
            max_input_tokens=700,
            otlp_endpoint="http://somewhere:4317",
            otlp_service_name="tgi.server",
        )
        config = configure(flags, {})
        assert (config.model.path, config.model.revision, config.model.dtype) == ("some/model", "v1", "bfloat16")
        assert config.model.trust_remote_code
        assert config.cache.kv_dtype == "fp8_e4m3"
        assert config.limits.max_input_tokens == 700
        assert config.server.uds_path == "socket"
        assert config.server.listen == ""
        assert config.tracing.otlp_endpoint == "http://somewhere:4317"
        assert config.tracing.service_name == "tgi.server"

    def test_what_the_launcher_leaves_out_stays_at_our_default(self) -> None:
        config = configure(FLAGS, {"CUDA_MEMORY_FRACTION": "1.0", "MAX_TOTAL_TOKENS": ""})
        assert (config.model.dtype, config.cache.kv_dtype) == ("auto", "auto")
        assert not config.model.trust_remote_code
        assert config.cache.memory_fraction == 0.9
        assert config.limits.max_total_tokens == "auto"

    def test_variables_of_the_launcher_become_keys(self) -> None:
        variables = {
            "CUDA_MEMORY_FRACTION": "0.5",
            "MAX_TOTAL_TOKENS": "3000",
            "MAX_BATCH_SIZE": "7",
            "CUDA_GRAPHS": "1,2",
        }
        config = configure(FLAGS, variables)
        assert config.cache.memory_fraction == 0.5
        assert config.limits.max_total_tokens == 3000
        assert config.scheduler.max_num_sequences == 7
        assert config.graphs.batch_sizes == (1, 2)

    def test_file_goes_under_launcher_s_variables_under_ours_under_launcher_s_flags(self, tmp_path: Path) -> None:
        file = tmp_path / "pagedkv.toml"
        file.write_text(
            'backend = "contiguous"\n[limits]\nmax_total_tokens = 100\nmax_input_tokens = 10\n'
            "[scheduler]\nmax_num_sequences = 1\n"
        )
        variables = {
            "PAGEDKV_CONFIG": str(file),
            "MAX_TOTAL_TOKENS": "200",
            "MAX_BATCH_SIZE": "2",
            "PAGEDKV_LIMITS_MAX_TOTAL_TOKENS": "300",
            "PAGEDKV_LIMITS_MAX_INPUT_TOKENS": "20",
        }
        config = configure(replace(FLAGS, max_input_tokens=30), variables)
        assert config.backend == "contiguous"
        assert config.scheduler.max_num_sequences == 2
        assert config.limits.max_total_tokens == 300
        assert config.limits.max_input_tokens == 30

    def test_everything_that_can_not_be_honoured_is_named_at_once(self) -> None:
        flags = replace(FLAGS, quantize="awq", speculate=2)
        variables = {"LORA_ADAPTERS": "a=b", "ROPE_SCALING": "linear", "ROPE_FACTOR": "2", "WATERMARK_GAMMA": "0.25"}
        with pytest.raises(ConfigError) as caught:
            configure(flags, variables)
        for name in ("--quantize awq", "--speculate 2", *variables):
            assert name in str(caught.value)

    def test_flags_at_a_value_that_is_ours_anyway_are_taken(self) -> None:
        configure(replace(FLAGS, speculate=0), {"WATERMARK_GAMMA": "0.50", "WATERMARK_DELTA": "2", "LORA_ADAPTERS": ""})

    @pytest.mark.parametrize("name", ["CUDA_MEMORY_FRACTION", "WATERMARK_DELTA"])
    def test_variable_that_is_no_number_is_refused_by_its_own_name(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"{name} must be a number"):
            configure(FLAGS, {name: "much"})

    def test_rank_and_number_of_shards_come_from_the_environment(self) -> None:
        assert read_shard({}, sharded=False) == (0, 1)
        assert read_shard({"RANK": "2", "WORLD_SIZE": "4"}, sharded=True) == (2, 4)
        for variables, sharded in (({"RANK": "1"}, False), ({"WORLD_SIZE": "two"}, False), ({}, True)):
            with pytest.raises(ConfigError, match="WORLD_SIZE"):
                read_shard(variables, sharded)


class TestWeights:
    def test_directory_with_weights_is_all_that_is_needed(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        assert ensure_weights(str(tmp_path), ".safetensors") == tmp_path

    def test_directory_without_weights_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(ConfigError, match="safetensors"):
            ensure_weights(str(tmp_path), ".safetensors")

    def test_command_finds_what_the_hub_s_cache_holds_and_refuses_what_it_lacks(
        self, shim: Path, tmp_path: Path
    ) -> None:
        snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").touch()
        refs = tmp_path / "models--some--model" / "refs"
        refs.mkdir()
        (refs / "main").write_text("0" * 40)
        environ = {**os.environ, "HUGGINGFACE_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        for model, code in (("some/model", 0), ("other/model", 1)):
            command = [shim, "download-weights", model, "--extension", ".safetensors", "--json-output"]
            done = subprocess.run(command, env=environ, capture_output=True, text=True)
            assert done.returncode == code, done.stderr
            assert (f"{model} is no directory here" in done.stderr) == bool(code)
            assert "Traceback" not in done.stderr


class TestShim:
    def test_another_program_s_command_is_never_replaced(self, tmp_path: Path) -> None:
        stock = tmp_path / "text-generation-server"
        stock.write_text("#!/bin/sh\necho stock\n")
        with pytest.raises(ConfigError, match="another program's"):
            write_shim(tmp_path, sys.executable)
        assert "stock" in stock.read_text()

    def test_it_is_found_on_the_path_whatever_folder_python_lies_in_and_replaces_itself(self, tmp_path: Path) -> None:
        python = tmp_path / "a folder with spaces" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        for _ in range(2):
            write_shim(tmp_path / "bin", str(python))
        environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(["text-generation-server", "--help"], env=environ, capture_output=True, text=True)
        assert done.returncode == 0
        assert "download-weights" in done.stdout

    def test_a_refused_flag_ends_it_with_a_reason_and_without_a_traceback(self, shim: Path, tmp_path: Path) -> None:
        command = [shim, "serve", str(tmp_path), "--uds-path", str(tmp_path / "s"), "--quantize", "gptq"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert "--quantize gptq" in done.stderr
        assert "Traceback" not in done.stderr


@dataclass
class Shard:
    """A server process as the launcher sees it."""

    process: subprocess.Popen[str]
    socket_path: Path
    errors: Path
    """Its standard error."""
    lines: list[str]
    """Its standard output so far."""
    stub: Any

    def call(self, method: str, request: Any) -> Any:
        return getattr(self.stub, method)(request, timeout=CALL_TIMEOUT_S)

    def replay(self, call: dict[str, Any]) -> Any:
        request = json_format.ParseDict(call["request"], getattr(pb, f"{call['method']}Request")())
        return self.call(call["method"], request)

    def prefill(self, request_id: int, text: str, max_new_tokens: int) -> Any:
        request = _request(request_id, text, max_new_tokens)
        return self.call("Prefill", pb.PrefillRequest(batch=pb.Batch(id=request_id, requests=[request], size=1)))

    def health_fault(self) -> str:
        try:
            self.call("Health", pb.HealthRequest())
        except grpc.RpcError as error:
            return error.details()
        return ""

    def code_of(self, call: Callable[[], object]) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        return caught.value.code()


def _request(request_id: int, text: str, max_new_tokens: int) -> pb.Request:
    return pb.Request(
        id=request_id,
        inputs=text,
        truncate=2048,
        add_special_tokens=True,
        parameters=pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=max_new_tokens, ignore_eos_token=True),
    )


@contextmanager
def launched(shim: Path, model: Path, folder: Path, num_shards: int = 1) -> Iterator[list[Shard]]:
    """Starts shards with the launcher's arguments and environment, and waits for their sockets as it does."""
    (folder / "pagedkv.toml").write_text(CONFIG_FILE)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        starts = [_start(stack, shim, model, folder, rank, num_shards, port) for rank in range(num_shards)]
        yield [_connect(stack, *start) for start in starts]


def _start(
    stack: ExitStack, shim: Path, model: Path, folder: Path, rank: int, num_shards: int, port: int
) -> tuple[subprocess.Popen[str], Path, Path, list[str]]:
    """Returns the process, its socket-to-be, its standard error and the lines of its standard output."""
    command = [shim, "serve", str(model), "--uds-path", str(folder / "tgi"), "--logger-level", "INFO", "--json-output"]
    shard = {"RANK": str(rank), "WORLD_SIZE": str(num_shards), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    errors = folder / f"stderr-{rank}"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [*command, *(["--sharded"] if num_shards > 1 else []), "--otlp-service-name", "tgi.server"],
            env={**os.environ, **LAUNCHER_ENVIRONMENT, **shard, "PAGEDKV_CONFIG": str(folder / "pagedkv.toml")},
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
    return Shard(process, socket_path, errors, lines, TextGenerationServiceStub(channel))


def test_launcher_s_shard_comes_up_answers_the_recorded_traces_and_drains(
    shim: Path, demo_model: Path, tmp_path: Path
) -> None:
    with launched(shim, demo_model, tmp_path) as (shard,):
        assert stat.S_IMODE(shard.socket_path.stat().st_mode) == 0o600
        assert shard.health_fault() == "the server is not warmed up yet"
        _start_as_a_router_does(shard)
        for trace in TRACES:
            _check_trace(shard, trace)
        _check_that_faulty_requests_hurt_no_one(shard)
        _check_that_a_client_s_end_ends_its_stream(shard)
        _check_drain(shard)
        assert shard.process.wait(CALL_TIMEOUT_S) == 0
        assert not shard.socket_path.exists()
    assert shard.errors.read_text() == ""
    records = [json.loads(line) for line in shard.lines]
    assert {record["record"]["level"]["name"] for record in records} <= {"INFO", "WARNING"}
    assert any("resolved config" in record["text"] for record in records)


def _start_as_a_router_does(shard: Shard) -> None:
    assert list(shard.call("ServiceDiscovery", pb.ServiceDiscoveryRequest()).urls) == [f"unix://{shard.socket_path}"]
    shard.call("ClearCache", pb.ClearCacheRequest())
    info = shard.call("Info", pb.InfoRequest())
    assert (info.requires_padding, info.support_chunking, info.block_size) == (False, True, 16)
    warmup = shard.call(
        "Warmup", pb.WarmupRequest(max_input_tokens=1024, max_prefill_tokens=512, max_total_tokens=2048)
    )
    assert (warmup.max_input_tokens, warmup.max_total_tokens) == (1024, 2048)
    assert warmup.max_supported_total_tokens == 192 * 16
    shard.call("Health", pb.HealthRequest())


def _check_trace(shard: Shard, trace: str) -> None:
    for call in json.loads((GOLDEN / f"{trace}.json").read_text(encoding="utf-8"))["calls"]:
        found = shard.replay(call)
        if call["method"] in ("Prefill", "Decode"):
            recorded = json_format.ParseDict(call["response"], type(found)())
            assert [list(g.tokens.ids) for g in found.generations] == [list(g.tokens.ids) for g in recorded.generations]
            assert [g.generated_text for g in found.generations] == [g.generated_text for g in recorded.generations]
    shard.call("ClearCache", pb.ClearCacheRequest())


def _check_that_faulty_requests_hurt_no_one(shard: Shard) -> None:
    running = shard.prefill(1, "The capital of France is", 4)
    invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    assert shard.code_of(lambda: shard.prefill(2, "", 4)) == invalid
    assert shard.code_of(lambda: shard.prefill(2, "too much", 0)) == invalid
    assert shard.code_of(lambda: shard.prefill(2, "too much", 2**31)) == invalid
    assert shard.code_of(lambda: shard.prefill(1, "again", 4)) == invalid
    assert shard.code_of(lambda: shard.prefill(2, "x" * 10_000_000, 4)) == invalid
    assert shard.code_of(lambda: shard.call("Decode", pb.DecodeRequest(batches=[pb.CachedBatch(id=9)]))) == missing
    while running.HasField("batch"):
        running = shard.call("Decode", pb.DecodeRequest(batches=[running.batch]))
    assert running.generations[0].generated_text.text == " Paris.\n\n"


def _check_that_a_client_s_end_ends_its_stream(shard: Shard) -> None:
    response = shard.prefill(3, "Once upon a time", 900)
    for _ in range(4):
        response = shard.call("Decode", pb.DecodeRequest(batches=[response.batch]))
    ended_s = time.monotonic()
    shard.call("ClearCache", pb.ClearCacheRequest(id=3))
    assert shard.code_of(lambda: shard.call("Decode", pb.DecodeRequest(batches=[response.batch]))).name == "NOT_FOUND"
    assert time.monotonic() - ended_s < 1


def _check_drain(shard: Shard) -> None:
    """SIGTERM with requests running: health flips, new work is refused, running work finishes."""
    batches = [shard.prefill(i, f"Story number {i}:", 4).batch for i in range(NUM_RUNNING)]
    shard.process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + CALL_TIMEOUT_S
    while shard.health_fault() != "the server is draining: running requests finish, new ones are refused":
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert shard.code_of(lambda: shard.prefill(99, "Too late", 2)) == grpc.StatusCode.UNAVAILABLE
    num_tokens = NUM_RUNNING
    response = shard.call("Decode", pb.DecodeRequest(batches=batches))
    num_tokens += len(response.generations)
    while response.HasField("batch"):
        response = shard.call("Decode", pb.DecodeRequest(batches=[response.batch]))
        num_tokens += len(response.generations)
    assert num_tokens == NUM_RUNNING * 4
    assert sum(generation.HasField("generated_text") for generation in response.generations) == NUM_RUNNING


@pytest.fixture(scope="module")
def tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 4 query and 2 KV heads, which two shards can divide; random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.5,
    )
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, directory / name)
    return directory


def test_launcher_s_two_shards_answer_each_for_its_part_and_end_in_order(
    shim: Path, tiny_model: Path, tmp_path: Path
) -> None:
    with launched(shim, tiny_model, tmp_path, num_shards=2) as shards, ThreadPoolExecutor(2) as threads:

        def call_all(method: str, request: Any) -> list[Any]:
            return list(threads.map(lambda shard: shard.call(method, request), shards))

        urls = [f"unix://{shard.socket_path}" for shard in shards]
        assert list(shards[0].call("ServiceDiscovery", pb.ServiceDiscoveryRequest()).urls) == urls
        warmups = call_all("Warmup", pb.WarmupRequest(max_prefill_tokens=64))
        assert warmups[0] == warmups[1]
        requests = [_request(request_id, f"Story number {request_id}:", 3) for request_id in range(5)]
        answers = call_all("Prefill", pb.PrefillRequest(batch=pb.Batch(id=1, requests=requests, size=5)))
        for _ in range(2):
            assert answers[0].batch == answers[1].batch
            assert [[g.request_id for g in answer.generations] for answer in answers] == [[0, 2, 4], [1, 3]]
            answers = call_all("Decode", pb.DecodeRequest(batches=[answers[0].batch]))
        assert all(g.generated_text.generated_tokens == 3 for answer in answers for g in answer.generations)
        assert not any(answer.HasField("batch") for answer in answers)
        for shard in shards:
            shard.process.send_signal(signal.SIGTERM)
        assert [shard.process.wait(CALL_TIMEOUT_S) for shard in shards] == [0, 0]
