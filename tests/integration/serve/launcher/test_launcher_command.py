"""`text-generation-server` as the launcher of text-generation-inference starts and ends it."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.integration.serve.launcher_command import configure, read_shard
from pagedkv.integration.serve.launcher_flags import LogLevel, ServeFlags
from pagedkv.integration.serve.launcher_shim import write_shim
from pagedkv.plugin.errors import ConfigError

GOLDEN = Path(__file__).parents[3] / "golden"
TRACES = ("01_greedy_single", "04_filter_batch", "06b_stop_multi_token")
FLAGS = ServeFlags(model_id="some/model", uds_path="socket")
CALL_TIMEOUT_S = 60
NUM_RUNNING = 10


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
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", ["OFF", "ERROR", "WARN", "INFO", "DEBUG", "TRACE"])
    def test_every_level_of_the_launcher_s_filter_is_one_of_python_s(self, name: str) -> None:
        assert isinstance(logging.getLevelName(LogLevel(name).python_name), int)

    def test_rank_and_number_of_shards_come_from_the_environment(self) -> None:
        assert read_shard({}, sharded=False) == (0, 1)
        assert read_shard({"RANK": "2", "WORLD_SIZE": "4"}, sharded=True) == (2, 4)
        for variables, sharded in (({"RANK": "1"}, False), ({"WORLD_SIZE": "two"}, False), ({}, True)):
            with pytest.raises(ConfigError, match="WORLD_SIZE"):
                read_shard(variables, sharded)


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
        done = subprocess.run([*command, "--json-output"], capture_output=True, text=True)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        (record,) = map(json.loads, done.stdout.splitlines())
        assert "--quantize gptq" in line
        assert line == f"text-generation-server: {record['text']}"
        assert record["record"]["level"] == {"name": "ERROR"}

    def test_what_shards_would_refuse_is_refused_before_a_download(self, shim: Path, tmp_path: Path) -> None:
        for variables, text in (
            ({"LORA_ADAPTERS": "some/adapter"}, "LORA_ADAPTERS=some/adapter: adapters can't be loaded yet"),
            ({"PAGEDKV_CACHE_BLOKSIZE": "8"}, "unknown environment variable PAGEDKV_CACHE_BLOKSIZE"),
        ):
            command = [shim, "download-weights", str(tmp_path), "--merge-lora"]
            done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
            assert done.returncode == 1
            assert text in done.stderr

    def test_a_flag_that_is_unknown_ends_it_without_a_frame(self, shim: Path, tmp_path: Path) -> None:
        done = subprocess.run([shim, "serve", str(tmp_path), "--no-such"], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == "Error: No such option: --no-such"


@pytest.mark.slow
def test_launcher_s_shard_comes_up_answers_the_recorded_traces_and_drains(
    launched: Callable[..., Any], demo_model: Path
) -> None:
    with launched(demo_model, {"PAGEDKV_PORT": "tcp://10.0.0.1:80", "PAGEDKV_SERVICE_HOST": "10.0.0.1"}) as (shard,):
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
    texts = [record["text"] for record in records]
    assert any("resolved config" in text for text in texts)
    assert any(text.endswith("are ignored: PAGEDKV_PORT, PAGEDKV_SERVICE_HOST") for text in texts)


def _start_as_a_router_does(shard: Any) -> None:
    assert list(shard.call("ServiceDiscovery", pb.ServiceDiscoveryRequest()).urls) == [f"unix://{shard.socket_path}"]
    shard.call("ClearCache", pb.ClearCacheRequest())
    info = shard.call("Info", pb.InfoRequest())
    assert (info.requires_padding, info.support_chunking, info.block_size) == (False, True, 16)
    warmup = shard.call(
        "Warmup", pb.WarmupRequest(max_input_tokens=1024, max_prefill_tokens=512, max_total_tokens=2048)
    )
    assert (warmup.max_input_tokens, warmup.max_total_tokens) == (1024, 2048)
    assert warmup.max_supported_total_tokens == 193 * 16, "the router keeps one block back"
    shard.call("Health", pb.HealthRequest())


def _check_trace(shard: Any, trace: str) -> None:
    for call in json.loads((GOLDEN / f"{trace}.json").read_text(encoding="utf-8"))["calls"]:
        found = shard.replay(call)
        if call["method"] in ("Prefill", "Decode"):
            recorded = json_format.ParseDict(call["response"], type(found)())
            assert [list(g.tokens.ids) for g in found.generations] == [list(g.tokens.ids) for g in recorded.generations]
            assert [g.generated_text for g in found.generations] == [g.generated_text for g in recorded.generations]
    shard.call("ClearCache", pb.ClearCacheRequest())


def _check_that_faulty_requests_hurt_no_one(shard: Any) -> None:
    running = shard.prefill(1, "The capital of France is", 4)
    invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    for text, reason in (("", "the prompt has no text"), ("x" * 10_000_000, "")):
        refused = shard.prefill(2, text, 4)
        assert not refused.HasField("batch")
        (generation,) = refused.generations
        assert reason in generation.generated_text.text
        assert generation.generated_text.finish_reason == pb.FINISH_REASON_EOS_TOKEN
    (clamped,) = shard.prefill(2, "nothing", 0).generations
    assert clamped.generated_text.generated_tokens == 1
    endless = shard.prefill(2, "too much", 2**31).batch
    shard.call("ClearCache", pb.ClearCacheRequest(id=endless.id))
    assert shard.code_of(lambda: shard.prefill(1, "again", 4)) == invalid
    assert shard.code_of(lambda: shard.call("Decode", pb.DecodeRequest(batches=[pb.CachedBatch(id=9)]))) == missing
    while running.HasField("batch"):
        running = shard.call("Decode", pb.DecodeRequest(batches=[running.batch]))
    assert running.generations[0].generated_text.text == " Paris.\n\n"


def _check_that_a_client_s_end_ends_its_stream(shard: Any) -> None:
    response = shard.prefill(3, "Once upon a time", 900)
    for _ in range(4):
        response = shard.call("Decode", pb.DecodeRequest(batches=[response.batch]))
    ended_s = time.monotonic()
    shard.call("ClearCache", pb.ClearCacheRequest(id=3))
    assert shard.code_of(lambda: shard.call("Decode", pb.DecodeRequest(batches=[response.batch]))).name == "NOT_FOUND"
    assert time.monotonic() - ended_s < 1


def _check_drain(shard: Any) -> None:
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
