"""A model split over processes: the tokens that one makes, a part of the KV heads on each, and one end for all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.integration.serve.child_process import ChildServer, child_server
from pagedkv.integration.serve.shards import EXIT_SHARD_FAILED, claim_device, take_own_cores
from pagedkv.plugin.cores import read_cpu_share
from pagedkv.plugin.distributed import ShardInfo
from pagedkv.plugin.errors import ConfigError

SCRIPT = Path(__file__).with_name("shard_outputs.py")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
CALL_TIMEOUT_S = 30
MAX_END_S = 10.0


@pytest.fixture(scope="module")
def outputs(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, SCRIPT, tmp_path_factory.mktemp("models"), demo_model],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert ended.returncode == 0, ended.stderr
    read: dict[str, Any] = json.loads(ended.stdout)
    assert [shard["failure"] for shards in read["shards"].values() for shard in shards] == [""] * 11
    return read


def _results(outputs: dict[str, Any], name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of the model alone, and of each shard."""
    return outputs["alone"][name], [shard["result"] for shard in outputs["shards"][name]]


def test_two_shards_generate_what_one_does_under_hits_chunks_evictions_and_preemption(outputs) -> None:
    alone, shards = _results(outputs, "halves")
    assert len(alone["tokens"]) == 40
    assert [shard["tokens"] for shard in shards] == [alone["tokens"]] * 2
    assert alone["stats"]["preemptions"] > 0
    assert alone["stats"]["prefix_cache_hit_tokens"] > 0
    assert alone["stats"]["evictions"] > 0
    schedule = ("steps", "preemptions", "prefix_cache_hit_tokens", "evictions", "recomputed_tokens")
    for shard in shards:
        assert {name: shard["stats"][name] for name in schedule} == {name: alone["stats"][name] for name in schedule}


def test_each_of_two_shards_holds_half_of_the_kv_heads_and_bytes(outputs) -> None:
    alone, shards = _results(outputs, "halves")
    assert alone["num_kv_heads"] == [4]
    assert [shard["num_kv_heads"] for shard in shards] == [[2], [2]]
    assert [shard["kv_bytes"] * 2 for shard in shards] == [alone["kv_bytes"]] * 2


@pytest.mark.parametrize("name", ["halves", "shared", "thirds"])
def test_the_largest_shard_holds_the_weights_that_a_plan_counts(outputs, name: str) -> None:
    _, shards = _results(outputs, name)
    assert max(shard["weight_bytes"] for shard in shards) == outputs["planned"][name]


def test_shards_beyond_the_number_of_kv_heads_keep_one_each_and_share_it(outputs) -> None:
    alone, shards = _results(outputs, "shared")
    assert alone["num_kv_heads"] == [2]
    assert [shard["tokens"] for shard in shards] == [alone["tokens"]] * 4
    assert [shard["num_kv_heads"] for shard in shards] == [[1]] * 4
    assert [shard["kv_bytes"] * 2 for shard in shards] == [alone["kv_bytes"]] * 4


def test_nine_query_heads_and_three_kv_heads_split_over_three_shards(outputs) -> None:
    alone, shards = _results(outputs, "thirds")
    assert [shard["tokens"] for shard in shards] == [alone["tokens"]] * 3
    assert [shard["kv_bytes"] * 3 for shard in shards] == [alone["kv_bytes"]] * 3


def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_do(outputs) -> None:
    for shard in outputs["shards"]["refused"]:
        reason, _ = shard["result"]
        assert "9 query heads and 3 KV heads can't be split over 2 shards" in reason
        assert reason.endswith("1, 3, 9")


def test_contiguous_backend_refuses_to_be_split(outputs) -> None:
    for shard in outputs["shards"]["refused"]:
        assert "contiguous backend serves a model with one shard" in shard["result"][1]


@pytest.fixture(scope="module")
def split_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildServer]:
    """Two shards of a tiny model with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("split")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    for name in TOKENIZER_FILES:
        shutil.copy(demo_model / name, folder / "model" / name)
    settings = ("cache.num_blocks=64", "model.dtype=float32", "model.device=cpu", "kernels.name=reference")
    arguments = [str(folder / "model"), "--num-shards", "2", "--uds-path", str(folder / "socket")]
    arguments += [part for setting in settings for part in ("--set", setting)]
    with child_server(arguments, folder / "log", environ={"OMP_NUM_THREADS": "1"}) as server:
        yield server


def _request(request_id: int) -> pb.Request:
    return pb.Request(
        id=request_id,
        inputs="The capital of France is",
        input_chunks=pb.Input(chunks=[pb.InputChunk(text="The capital of France is")]),
        truncate=64,
        parameters=pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=4, ignore_eos_token=True),
        add_special_tokens=True,
    )


def _call_all(stubs: list[TextGenerationServiceStub], method: str, request: Any) -> list[Any]:
    """As a router does: all shards at once."""
    calls = [getattr(stub, method).future(request, timeout=CALL_TIMEOUT_S) for stub in stubs]
    return [call.result() for call in calls]


def test_every_shard_reports_its_part_of_the_requests(split_server: ChildServer) -> None:
    assert len(split_server.summary["targets"]) == 2
    channels = [grpc.insecure_channel(target) for target in split_server.summary["targets"]]
    stubs = [TextGenerationServiceStub(channel) for channel in channels]
    batch = pb.Batch(id=1, requests=[_request(10), _request(11)], size=2)
    answers = [_call_all(stubs, "Prefill", pb.PrefillRequest(batch=batch))]
    while answers[-1][0].HasField("batch"):
        assert answers[-1][0].batch == answers[-1][1].batch
        answers.append(_call_all(stubs, "Decode", pb.DecodeRequest(batches=[answers[-1][0].batch])))
    for rank in range(2):
        reported = [generation.request_id for step in answers for generation in step[rank].generations]
        assert reported == [10 + rank] * 4
    texts = [shard.generations[0].generated_text.text for shard in answers[-1]]
    assert texts[0] == texts[1] != ""
    for channel in channels:
        channel.close()
    _check_that_every_shard_has_metrics_of_its_own(split_server)


def _check_that_every_shard_has_metrics_of_its_own(server: ChildServer) -> None:
    urls = server.summary["metrics_urls"]
    assert len(set(urls)) == 2
    for rank, url in enumerate(urls):
        with urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        ended = f'pagedkv_requests_total{{backend="paged",outcome="length",rank="{rank}"}} 2.0'
        assert ended in lines, "every shard runs every request"


def test_processes_of_two_shards_have_cores_of_their_own(split_server: ChildServer) -> None:
    shards = [child for child in psutil.Process(split_server.process.pid).children() if "--rank" in child.cmdline()]
    first, second = (set(shard.cpu_affinity()) for shard in shards)
    assert not first & second or len(read_cpu_share().cores) < 2


def test_killing_one_shard_ends_the_other_and_the_command_within_seconds(split_server: ChildServer) -> None:
    command = psutil.Process(split_server.process.pid)
    (second,) = (child for child in command.children() if "--rank 1" in " ".join(child.cmdline()))
    killed_s = time.monotonic()
    second.send_signal(signal.SIGKILL)
    code = split_server.process.wait(MAX_END_S)
    assert time.monotonic() - killed_s < MAX_END_S
    assert code == EXIT_SHARD_FAILED
    log = split_server.log.read_text()
    assert "this shard ends: rank 1 has ended unexpectedly" in log
    assert f"rank 0 ended with code {EXIT_SHARD_FAILED}" in log


def test_several_shards_are_not_served_over_tcp(pagedkv, demo_model: Path) -> None:
    outcome = pagedkv("serve", demo_model, "--num-shards", "2", "--listen", "127.0.0.1:0")
    assert outcome.code == 2
    assert "set server.uds_path" in outcome.err


def test_rank_beyond_the_number_of_shards_is_refused(pagedkv, demo_model: Path) -> None:
    outcome = pagedkv("serve", demo_model, "--num-shards", "2", "--rank", "2", "--uds-path", "socket")
    assert outcome.code == 2
    assert "ranks go from 0 to 1" in outcome.err


class TestDeviceOfAShard:
    def test_cpu_hides_every_gpu(self) -> None:
        environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
        assert claim_device("cpu", 1, environ) == "cpu"
        assert environ["CUDA_VISIBLE_DEVICES"] == ""

    @pytest.mark.parametrize(("visible", "own"), [(None, "1"), ("3,5", "5"), ("", "")])
    def test_gpu_of_the_rank_becomes_the_only_one(self, visible: str | None, own: str) -> None:
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        claim_device("auto", 1, environ)
        assert environ["CUDA_VISIBLE_DEVICES"] == own
        assert environ["LOCAL_RANK"] == "0"

    def test_more_shards_than_visible_gpus_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="no GPU for rank 2"):
            claim_device("cuda", 2, {"CUDA_VISIBLE_DEVICES": "3,5"})

    def test_one_gpu_for_all_shards_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="a device of its own"):
            claim_device("cuda:1", 0, {})


def _cores_taken(num_shards: int, rank: int, num_threads: int) -> set[int]:
    """The affinity of a thread that takes a shard's cores: affinity belongs to a thread, so the others keep theirs."""

    def take() -> set[int]:
        take_own_cores(ShardInfo(rank, num_shards), num_threads)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as one:
        return one.submit(take).result()


def test_shards_of_one_machine_do_not_share_cores() -> None:
    num_cores = len(read_cpu_share().cores)
    if num_cores < 2:
        pytest.skip("one core can't be shared out")
    first, second = (_cores_taken(2, rank, num_threads=1) for rank in range(2))
    assert first
    assert second
    assert not first & second


def test_shards_share_cores_that_are_too_few_or_that_their_threads_were_set_for() -> None:
    every, num_cores = os.sched_getaffinity(0), len(read_cpu_share().cores)
    assert _cores_taken(num_cores + 1, 0, num_threads=1) == every
    assert _cores_taken(2, 0, num_threads=num_cores) == every
