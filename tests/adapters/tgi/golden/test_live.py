"""What a recording can't hold: answers in time, with a real model and real kernels."""

from __future__ import annotations

import time

from pagedkv.adapters.tgi import generate_pb2 as pb

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
    beside = golden.wire.request(2, "The capital of France is", max_new_tokens=4)
    endless = golden.wire.request(
        1, "Once upon a time", max_new_tokens=1500, stopping_parameters={"ignore_eos_token": True}
    )
    other = golden.wire.prefill(2, beside)
    response = golden.wire.prefill(1, endless)
    for _ in range(4):
        response = golden.wire.decode(response.batch)
    golden.wire.stub.Decode.future(pb.DecodeRequest(batches=[response.batch])).cancel()
    deadline_s = time.monotonic() + 1
    while golden.served.server.service.num_requests > 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert golden.wire.finish(other) == {2: " Paris.\n\n"}
