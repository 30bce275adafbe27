"""What a recording can't hold: answers in time, with a real model and real kernels."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.client import GenerationClient
from pagedkv.plugin.requests import SamplingParams

LONG_PROMPT = "all work and no play makes Jack a dull boy " * 60


def test_health_answers_within_a_second_while_a_long_prompt_is_prefilled(golden):
    request = golden.wire.request(1, LONG_PROMPT, max_new_tokens=2)
    call = golden.wire.stub.Prefill.future(pb.PrefillRequest(batch=pb.Batch(id=1, requests=[request])))
    num_answers = 0
    while not call.done():
        golden.wire.stub.Health(pb.HealthRequest(), timeout=1)
        num_answers += 1
        time.sleep(0.02)
    assert num_answers >= 2
    call.result()


def test_a_long_stream_whose_client_goes_away_ends_within_a_second_and_spares_the_one_beside_it(golden):
    other = golden.wire.prefill(2, golden.wire.request(2, "The capital of France is", max_new_tokens=4))

    async def read_five_tokens_and_leave():
        async with GenerationClient(golden.served.target) as client:
            params = SamplingParams(max_new_tokens=1500, ignore_eos=True)
            async with aclosing(client.generate("Once upon a time", params)) as tokens:
                for _ in range(5):
                    await anext(tokens)
                left_s = time.monotonic()
        return left_s

    left_s = asyncio.run(read_five_tokens_and_leave())
    assert golden.served.server.service.num_requests == 1
    assert time.monotonic() - left_s < 1
    assert golden.wire.finish(other) == {2: " Paris.\n\n"}
