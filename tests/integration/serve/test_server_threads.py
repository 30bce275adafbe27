"""Parallel regions of a real server: one thread enters them, so that there is one team of OpenMP's threads."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedkv.adapters.smg import engine_pb2 as smg
from pagedkv.adapters.tgi import generate_pb2 as tgi
from pagedkv.adapters.tgi.client import KEEP_ALL_TOKENS
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub

NUM_THREADS = 2
# Each thread that comes into a team tells once of which team, and which of its threads it is. The first is who entered.
TELL_TEAMS = {"OMP_DISPLAY_AFFINITY": "TRUE", "OMP_AFFINITY_FORMAT": "omp-team %N %n %i"}
TOLD = re.compile(r"^omp-team (\d+) (\d+) (\S+)$", re.MULTILINE)
LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def _request(request_id: int) -> tgi.Request:
    """A request for which all that a server computes beside the model is computed."""
    return tgi.Request(
        id=request_id,
        inputs=LONG_TEXT,
        truncate=KEEP_ALL_TOKENS,
        add_special_tokens=True,
        prefill_logprobs=True,
        top_n_tokens=5,
        parameters=tgi.NextTokenChooserParameters(
            temperature=0.7,
            top_k=50,
            top_p=0.9,
            typical_p=0.9,
            do_sample=True,
            seed=request_id,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            watermark=True,
        ),
        stopping_parameters=tgi.StoppingCriteriaParameters(
            max_new_tokens=8, ignore_eos_token=True, stop_sequences=["@"]
        ),
    )


async def _call_all(channel: grpc.aio.Channel) -> None:
    stub: Any = TextGenerationServiceStub(channel)
    await stub.Info(tgi.InfoRequest())
    await stub.Health(tgi.HealthRequest())
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    batch = tgi.Batch(id=1, requests=[_request(number) for number in range(4)], size=4)
    running = (await stub.Prefill(tgi.PrefillRequest(batch=batch))).batch
    for _ in range(3):
        running = (await stub.Decode(tgi.DecodeRequest(batches=[running]))).batch
    filtered = await stub.FilterBatch(tgi.FilterBatchRequest(batch_id=running.id, request_ids=[0, 1]))
    await stub.Decode(tgi.DecodeRequest(batches=[filtered.batch]))
    await stub.ClearCache(tgi.ClearCacheRequest())


async def _stream(channel: grpc.aio.Channel, number: int) -> None:
    params = smg.SamplingParams(
        temperature=0.7, top_k=50, top_p=0.9, max_tokens=8, logprobs=5, repetition_penalty=1.2, stop=["@"]
    )
    ids = [504, 3575, 282, 4649, 314] * 60 + [number]
    request = smg.GenerateRequest(
        request_id=f"r{number}", tokenized=smg.TokenizedInput(input_ids=ids), sampling_params=params, stream=True
    )
    call = channel.unary_stream(
        "/vllm.grpc.engine.VllmEngine/Generate",
        request_serializer=smg.GenerateRequest.SerializeToString,
        response_deserializer=smg.GenerateResponse.FromString,
    )(request)
    assert [message async for message in call]


async def _play(target: str, metrics_url: str, has_gateway: bool) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        await _call_all(channel)
        if has_gateway:
            await asyncio.gather(*(_stream(channel, number) for number in range(4)))
        await asyncio.to_thread(lambda: urllib.request.urlopen(metrics_url).read())


@pytest.mark.parametrize(("backend", "protocols"), [("paged", "tgi,smg"), ("contiguous", "tgi")])
def test_one_thread_of_a_server_enters_parallel_regions(launch_server: Any, backend: str, protocols: str) -> None:
    arguments = ["--backend", backend, "--protocol", protocols, "--listen", "127.0.0.1:0"]
    arguments += ["--set", f"model.threads={NUM_THREADS}"]
    with launch_server(*arguments, uds_path=False, environ=TELL_TEAMS) as server:
        asyncio.run(_play(server.target, server.summary["metrics_urls"][0], "smg" in protocols))
        assert server.stop() == 0
        log = Path(server.log).read_text()
    told = TOLD.findall(log)
    entered = {thread for size, number, thread in told if number == "0" and size != "1"}
    others = {thread for _, number, thread in told if number != "0"}
    assert len(entered) == 1, told
    assert len(others) == NUM_THREADS - 1, told
    assert server.summary["num_threads"] == NUM_THREADS
    assert f"threads: {NUM_THREADS} (model.threads)" in log
