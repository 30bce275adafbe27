"""The service over a real socket, with a backend whose tokens can be told in advance."""

from __future__ import annotations

import math
import threading
import time

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.plugin.errors import CapacityError, StepError

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
INTERNAL = grpc.StatusCode.INTERNAL
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def texts(response):
    return {generation.request_id: list(generation.tokens.texts) for generation in response.generations}


def wait_until(condition, timeout_s=5.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about in time"
        time.sleep(0.005)


class TestBatches:
    def test_a_request_runs_a_token_a_call_until_its_limit(self, wire):
        response = wire.prefill(7, wire.request(1, "a", max_new_tokens=3))
        assert texts(response) == {1: ["b"]}
        assert response.batch == pb.CachedBatch(id=7, request_ids=[1], size=1, max_tokens=4, current_tokens=1)
        response = wire.decode(response.batch)
        assert texts(response) == {1: ["c"]}
        response = wire.decode(response.batch)
        assert texts(response) == {1: ["d"]}
        assert not response.HasField("batch")
        final = response.generations[0].generated_text
        assert (final.text, final.generated_tokens, final.finish_reason) == ("bcd", 3, pb.FINISH_REASON_LENGTH)
        assert not final.HasField("seed")

    def test_a_batch_is_gone_after_its_last_request(self, wire):
        wire.prefill(7, wire.request(1, "a", max_new_tokens=1))
        assert wire.refused(lambda: wire.decode(7))[0] == NOT_FOUND

    def test_an_answer_counts_live_requests_alone(self, wire):
        response = wire.prefill(0, wire.request(0, "a", max_new_tokens=1), wire.request(1, "a", max_new_tokens=2))
        assert list(response.batch.request_ids) == [1]
        assert response.batch.size == 1
        response = wire.decode(response.batch)
        assert texts(response) == {1: ["c"]}, "a finished request must not go on"

    def test_decode_joins_batches_under_the_first_id(self, wire):
        first = wire.prefill(4, wire.request(1, "a"), wire.request(2, "k"))
        second = wire.prefill(3, wire.request(3, "p"))
        assert not first.HasField("concat_ns")
        joined = wire.decode(first.batch, second.batch)
        assert list(texts(joined)) == [1, 2, 3]
        assert (joined.batch.id, list(joined.batch.request_ids)) == (4, [1, 2, 3])
        assert joined.HasField("concat_ns")
        assert wire.refused(lambda: wire.decode(second.batch))[0] == NOT_FOUND
        assert wire.finish(joined) == {1: "bcdef", 2: "lmnop", 3: "qrstu"}

    def test_decode_of_one_batch_leaves_the_others_alone(self, wire):
        wire.prefill(1, wire.request(1, "a"))
        wire.prefill(2, wire.request(2, "k"))
        assert texts(wire.decode(1)) == {1: ["c"]}
        assert texts(wire.decode(2)) == {2: ["m"]}
        wire.clear()

    def test_prefill_steps_a_running_batch_along_and_answers_for_both(self, wire):
        running = wire.prefill(1, wire.request(1, "a")).batch
        response = wire.prefill(2, wire.request(2, "k"), running=running)
        assert texts(response) == {1: ["c"], 2: ["l"]}
        assert (response.batch.id, list(response.batch.request_ids)) == (1, [1, 2])
        assert wire.refused(lambda: wire.decode(2))[0] == NOT_FOUND
        assert wire.finish(response) == {1: "bcdef", 2: "lmnop"}

    def test_a_prompt_in_chunks_is_answered_by_a_batch_without_its_generation(self, wire, backend):
        backend.prefill_budget = 4
        response = wire.prefill(1, wire.request(1, "abcdefghij", max_new_tokens=2))
        assert not response.generations
        assert response.batch.current_tokens == 10, "the next step may compute all of the prompt"
        response = wire.decode(response.batch)
        assert not response.generations
        response = wire.decode(response.batch)
        assert texts(response) == {1: ["k"]}
        assert response.batch.current_tokens == 1
        wire.clear()

    def test_filter_keeps_the_named_requests_in_the_order_named(self, wire, backend):
        wire.prefill(1, wire.request(1, "a"), wire.request(2, "k"), wire.request(3, "p"))
        assert list(wire.filter(1, 3, 1).request_ids) == [3, 1]
        assert set(backend.requests) == {1, 3}
        assert list(texts(wire.decode(1))) == [3, 1]
        wire.clear(1)

    def test_filter_that_drops_nobody_changes_nothing(self, wire):
        batch = wire.prefill(1, wire.request(1, "a"), wire.request(2, "k")).batch
        assert wire.filter(1, 2, 1) == batch
        wire.clear(1)

    def test_clear_ends_one_batch_or_all_and_passes_over_unknown_ones(self, wire, backend):
        for batch_id in (1, 2, 3):
            wire.prefill(batch_id, wire.request(batch_id, "a"))
        wire.clear(2)
        assert set(backend.requests) == {1, 3}
        wire.clear(12345)
        wire.clear()
        assert not backend.requests

    def test_a_padding_backend_counts_its_rectangle(self, make_backend, make_tokenizer, serving, tmp_path):
        with serving(make_backend(requires_padding=True), make_tokenizer(), tmp_path) as served:
            wire = served.wire
            batch = wire.prefill(1, wire.request(1, "ab", max_new_tokens=9), wire.request(2, "abcd")).batch
            assert batch.max_tokens == 2 * (4 + 9)

    def test_each_of_several_shards_reports_every_so_manieth_request(
        self, make_backend, make_tokenizer, serving, tmp_path
    ):
        answers = []
        for rank in range(2):
            with serving(make_backend(), make_tokenizer(), tmp_path, rank=rank, num_shards=2) as served:
                assert served.target.endswith(f"-{rank}")
                urls = served.wire.stub.ServiceDiscovery(pb.ServiceDiscoveryRequest()).urls
                assert list(urls) == [f"unix://{tmp_path}/tgi-0", f"unix://{tmp_path}/tgi-1"]
                answers.append(served.wire.prefill(1, *(served.wire.request(i, "a") for i in (10, 11, 12))))
        assert list(texts(answers[0])) == [10, 12]
        assert list(texts(answers[1])) == [11]
        assert answers[0].batch == answers[1].batch

    def test_the_router_s_probe_is_answered_at_once(self, wire):
        top = 2**64 - 1
        response = wire.prefill(top, wire.request(top, "liveness", max_new_tokens=1, truncate=1, blocks=[0], slots=[0]))
        assert response.generations[0].request_id == top
        assert response.generations[0].generated_text.text == "t"
        assert not response.HasField("batch")


class TestAnswers:
    def test_end_of_text_is_streamed_and_left_out_of_the_whole_text(self, wire):
        response = wire.prefill(1, wire.request(1, "y"))
        response = wire.decode(response.batch)
        (generation,) = response.generations
        assert list(generation.tokens.texts) == ["</s>"]
        assert list(generation.tokens.is_special) == [True]
        final = generation.generated_text
        assert (final.text, final.generated_tokens, final.finish_reason) == ("z", 2, pb.FINISH_REASON_EOS_TOKEN)

    def test_a_stop_string_ends_the_request_in_the_backend_too(self, wire, backend):
        response = wire.prefill(1, wire.request(1, "a", stopping_parameters={"stop_sequences": ["x", "cd"]}))
        response = wire.decode(response.batch)
        response = wire.decode(response.batch)
        final = response.generations[0].generated_text
        assert (final.text, final.finish_reason) == ("bcd", pb.FINISH_REASON_STOP_SEQUENCE)
        assert not response.HasField("batch")
        assert not backend.requests

    def test_the_limit_is_named_before_a_stop_string_that_ends_in_the_same_token(self, wire):
        response = wire.prefill(1, wire.request(1, "a", 1, stopping_parameters={"stop_sequences": ["b"]}))
        assert response.generations[0].generated_text.finish_reason == pb.FINISH_REASON_LENGTH

    def test_prompt_logprobs_come_once_with_each_id_decoded_alone(self, wire):
        response = wire.prefill(1, wire.request(1, "é!", prefill_logprobs=True))
        prompt = response.generations[0].prefill_tokens
        assert list(prompt.texts) == ["\ufffd", "\ufffd", "!"]
        assert math.isnan(prompt.logprobs[0])
        assert list(prompt.logprobs[1:]) == [-0.5, -0.5]
        assert not prompt.is_special
        assert not wire.decode(response.batch).generations[0].HasField("prefill_tokens")
        wire.clear()

    def test_top_tokens_have_texts_and_marks(self, wire):
        response = wire.prefill(1, wire.request(1, "y", max_new_tokens=1, top_n_tokens=2))
        (top,) = response.generations[0].top_tokens
        assert list(top.texts) == ["z", "{"]
        assert list(top.is_special) == [False, False]

    @pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
    def test_the_seed_is_told_when_the_request_samples(self, wire, seed):
        response = wire.prefill(1, wire.request(1, "a", 1, parameters={"do_sample": True, "seed": seed}))
        assert response.generations[0].generated_text.HasField("seed")
        assert response.generations[0].generated_text.seed == seed

    def test_cached_prompt_tokens_are_told_in_the_metadata_of_the_first_answer(self, wire):
        prompt = pb.PrefillRequest(batch=pb.Batch(id=1, requests=[wire.request(5, "a" * 40)]))
        response, call = wire.stub.Prefill.with_call(prompt)
        assert ("pagedkv-cached-tokens", "5=32") in [tuple(entry) for entry in call.trailing_metadata()]
        _, call = wire.stub.Decode.with_call(pb.DecodeRequest(batches=[response.batch]))
        assert not [key for key, _ in call.trailing_metadata() if key.startswith("pagedkv")]
        wire.clear()

    def test_the_metadata_of_a_large_batch_stays_small(self, wire):
        requests = [wire.request(i, "a" * 40, max_new_tokens=1) for i in range(200)]
        response, call = wire.stub.Prefill.with_call(pb.PrefillRequest(batch=pb.Batch(id=1, requests=requests)))
        assert len(response.generations) == 200
        assert not [key for key, _ in call.trailing_metadata() if key.startswith("pagedkv")]


class TestStartUp:
    def test_info_says_what_the_backend_is(self, wire):
        info = wire.stub.Info(pb.InfoRequest())
        assert info == pb.InfoResponse(
            dtype="torch.float32",
            device_type="cpu",
            support_chunking=True,
            use_prefix_caching=True,
            attention_impl="none",
            block_size=16,
        )
        assert not info.HasField("window_size")

    def test_chunking_can_be_kept_from_clients(self, backend, make_tokenizer, serving, tmp_path):
        with serving(backend, make_tokenizer(), tmp_path, chunked_prefill=False) as served:
            assert not served.wire.stub.Info(pb.InfoRequest()).support_chunking

    def test_a_server_is_healthy_from_its_warm_up_on(self, backend, make_tokenizer, serving, tmp_path):
        with serving(backend, make_tokenizer(), tmp_path, warmup_limits=None) as served:
            wire = served.wire
            assert wire.refused(wire.health)[0] == UNAVAILABLE
            assert wire.refused(lambda: wire.prefill(1, wire.request(1, "a")))[0] == UNAVAILABLE
            wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64))
            wire.health()

    def test_warm_up_repeats_given_limits_and_answers_open_ones(self, wire, backend):
        answer = wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64, max_input_tokens=20, max_total_tokens=60))
        assert (answer.max_input_tokens, answer.max_total_tokens) == (20, 60)
        assert (backend.limits.max_input_tokens, backend.limits.max_total_tokens) == (20, 60)
        assert backend.limits.max_prefill_tokens == 64
        answer = wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64))
        assert (answer.max_input_tokens, answer.max_total_tokens) == (255, 256)

    def test_one_block_more_is_told_than_there_is_for_the_router_keeps_one_back(self, wire):
        answer = wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64))
        assert answer.max_supported_total_tokens == 4096 + 16

    def test_no_less_is_told_than_the_router_needs_to_start(self, wire):
        answer = wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=5000))
        assert answer.max_supported_total_tokens == 5000

    @pytest.mark.parametrize("chunked_prefill", [True, False])
    def test_the_backend_hears_whether_prompts_come_in_chunks(
        self, backend, make_tokenizer, serving, tmp_path, chunked_prefill
    ):
        with serving(backend, make_tokenizer(), tmp_path, chunked_prefill=chunked_prefill) as served:
            served.wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64))
            assert backend.limits.may_chunk_prefill is chunked_prefill

    def test_a_padding_backend_leaves_its_cache_s_size_out(self, make_backend, make_tokenizer, serving, tmp_path):
        with serving(make_backend(requires_padding=True), make_tokenizer(), tmp_path) as served:
            answer = served.wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64))
            assert not answer.HasField("max_supported_total_tokens")

    def test_a_warm_up_that_fails_leaves_health_and_limits_as_they_were(self, wire, backend):
        def fail(limits):
            raise CapacityError("too little memory")

        backend.warmup = fail
        code, details = wire.refused(lambda: wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64)))
        assert (code, details) == (INVALID, "too little memory")
        wire.health()
        assert wire.finish(wire.prefill(1, wire.request(1, "a" * 253, 4))) == {1: "bcd"}

    def test_warm_up_is_refused_while_requests_are_live(self, wire):
        wire.prefill(1, wire.request(1, "a"))
        assert wire.refused(lambda: wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=64)))[0] == INVALID
        wire.health()
        assert wire.finish(wire.decode(1)) == {1: "bcdef"}


class TestErrors:
    """Every refusal is for one call alone: a stream beside it goes on as if nothing had been."""

    @pytest.fixture(autouse=True)
    def stream_beside(self, wire, served):
        running = wire.prefill(100, wire.request(100, "a", max_new_tokens=8))
        yield
        assert wire.finish(running) == {100: "bcdefghi"}
        wire.health()

    def test_unknown_batches_and_requests_are_not_found_and_nothing_is_lost(self, wire):
        wire.prefill(1, wire.request(1, "a"), wire.request(2, "k"))
        for call in (
            lambda: wire.decode(777),
            lambda: wire.decode(1, 777),
            lambda: wire.filter(777, 1),
            lambda: wire.filter(1, 999),
            lambda: wire.filter(1, 1, 999),
            lambda: wire.prefill(9, wire.request(9, "a"), running=pb.CachedBatch(id=777)),
        ):
            assert wire.refused(call)[0] == NOT_FOUND
        assert wire.finish(wire.decode(1)) == {1: "bcdef", 2: "lmnop"}

    def test_calls_that_name_nothing_or_the_same_twice_are_invalid(self, wire):
        wire.prefill(1, wire.request(1, "a"))
        for call in (
            lambda: wire.decode(),
            lambda: wire.decode(1, 1),
            lambda: wire.filter(1),
            lambda: wire.prefill(2),
            lambda: wire.stub.Prefill(pb.PrefillRequest()),
        ):
            assert wire.refused(call)[0] == INVALID
        assert wire.finish(wire.decode(1)) == {1: "bcdef"}

    def test_a_request_id_or_batch_id_that_is_live_is_refused_and_its_owner_goes_on(self, wire):
        wire.prefill(1, wire.request(1, "a"))
        assert wire.refused(lambda: wire.prefill(2, wire.request(2, "k"), wire.request(1, "k")))[0] == INVALID
        assert wire.refused(lambda: wire.prefill(2, wire.request(3, "k"), wire.request(3, "k")))[0] == INVALID
        assert wire.refused(lambda: wire.prefill(1, wire.request(4, "k")))[0] == INVALID
        assert wire.finish(wire.decode(1)) == {1: "bcdef"}
        assert wire.finish(wire.prefill(2, wire.request(1, "k"))) == {1: "lmnop"}, "the ids are free again"

    def test_a_prompt_one_token_over_the_limit_ends_alone(self, wire):
        text = wire.ended_early(wire.request(7, "a" * 256, 1))[7]
        assert "256 tokens" in text
        assert "255" in text
        assert wire.finish(wire.prefill(1, wire.request(7, "a" * 255, 1))) == {7: "b"}

    def test_a_prompt_of_ten_megabytes_is_cut_before_it_is_tokenized(self, wire):
        started_s = time.monotonic()
        request = wire.request(1, "b" * 10_000_000 + "a", 2, truncate=100)
        assert wire.finish(wire.prefill(1, request)) == {1: "bc"}
        assert time.monotonic() - started_s < 5

    def test_a_message_over_the_configured_size_is_refused(self, wire):
        code, _ = wire.refused(lambda: wire.prefill(1, wire.request(1, "a" * (65 * 2**20))))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED

    @pytest.mark.parametrize(
        "data",
        [
            b"\x0a\x0b\x12\x09\x08\x01\x12\x05ab\xff\xfe!",  # inputs that are no UTF-8
            b"\x0a\xff",  # a length beyond the end
            b"\xff\xff\xff\xff",
        ],
    )
    def test_bytes_that_are_no_message_are_invalid(self, wire, data):
        call = wire.channel.unary_unary("/generate.v3.TextGenerationService/Prefill")
        assert wire.refused(lambda: call(data))[0] == INVALID

    def test_a_refusal_that_quotes_the_client_at_length_arrives(self, wire):
        batch = pb.CachedBatch(id=2**63)
        requests = [wire.request(2**62 + i, "a") for i in range(200)]
        code, details = wire.refused(lambda: wire.filter(100, *(request.id for request in requests)))
        assert code == NOT_FOUND
        assert str(2**62) in details
        assert wire.refused(lambda: wire.prefill(2, *requests, running=batch))[0] == NOT_FOUND

    def test_an_unknown_method_is_unimplemented(self, wire):
        call = wire.channel.unary_unary("/generate.v3.TextGenerationService/Nope")
        assert wire.refused(lambda: call(b""))[0] == grpc.StatusCode.UNIMPLEMENTED

    def test_a_failed_step_ends_the_requests_it_names_and_no_others(self, wire, backend):
        wire.prefill(1, wire.request(1, "a"), wire.request(2, "k"))

        def fail(ids):
            if 2 in ids:
                backend.abort([2])
                raise StepError("out of luck", [2])

        backend.before_step = fail
        response = wire.decode(1)
        (ended,) = response.generations
        assert ended.request_id == 2
        assert ended.generated_text.text == "l\n\nThe request failed: out of luck"
        assert list(ended.tokens.texts) == ["\n\nThe request failed: out of luck"]
        assert list(response.batch.request_ids) == [1]
        assert wire.finish(wire.decode(response.batch)) == {1: "bcdef"}

    def test_a_step_that_fails_for_all_of_a_call_is_an_error(self, wire, backend):
        wire.prefill(1, wire.request(1, "a"), wire.request(2, "k"))

        def fail(ids):
            if 2 in ids:
                backend.abort([1, 2])
                raise StepError("out of luck", [1, 2])

        backend.before_step = fail
        assert wire.refused(lambda: wire.decode(1)) == (INTERNAL, "out of luck")
        assert wire.refused(lambda: wire.decode(1))[0] == NOT_FOUND

    def test_a_failed_prefill_ends_the_requests_it_names_and_spares_the_others(self, wire, backend):
        running = wire.prefill(1, wire.request(1, "a")).batch

        def fail(ids):
            if 3 in ids:
                backend.abort([3])
                raise StepError("out of luck", [3])

        backend.before_step = fail
        response = wire.prefill(2, wire.request(2, "k"), wire.request(3, "k"), running=running)
        assert [generation.request_id for generation in response.generations] == [3]
        assert wire.finish(response) == {1: "bcdef", 2: "lmnop", 3: "The request failed: out of luck"}

    def test_a_router_that_clears_its_failed_prefill_has_given_up_the_running_batch_too(self, wire, backend):
        running = wire.prefill(1, wire.request(1, "a")).batch
        assert wire.refused(lambda: wire.prefill(2, running=running))[0] == INVALID
        assert 1 in backend.requests
        wire.clear(2)
        assert 1 not in backend.requests

    def test_a_client_that_goes_on_after_a_failed_prefill_keeps_its_running_batch(self, wire):
        running = wire.prefill(1, wire.request(1, "a")).batch
        wire.refused(lambda: wire.prefill(2, running=running))
        running = wire.decode(1)
        wire.clear(2)
        assert wire.finish(running) == {1: "bcdef"}

    def test_a_fault_of_the_server_is_internal_and_says_only_an_id(self, wire, backend, caplog):
        wire.prefill(1, wire.request(1, "a"))

        def fail(ids):
            if 1 in ids:
                raise RuntimeError("a secret")

        backend.before_step = fail
        code, details = wire.refused(lambda: wire.decode(1))
        assert code == INTERNAL
        assert "secret" not in details
        error_id = details.split()[2].rstrip(";")
        (record,) = [record for record in caplog.records if error_id in record.getMessage()]
        assert "a secret" in str(record.exc_info[1])
        assert wire.refused(lambda: wire.decode(1))[0] == NOT_FOUND


class TestCancellation:
    def test_a_client_that_goes_away_during_a_step_frees_its_requests_and_no_others(self, wire, backend):
        entered, go_on = threading.Event(), threading.Event()
        wire.prefill(1, wire.request(1, "a"))
        wire.prefill(2, wire.request(2, "k"))

        def hold(ids):
            if ids == [1]:
                entered.set()
                go_on.wait(10)

        backend.before_step = hold
        call = wire.stub.Decode.future(pb.DecodeRequest(batches=[pb.CachedBatch(id=1)]))
        assert entered.wait(5)
        call.cancel()
        time.sleep(0.05)
        assert set(backend.requests) == {1, 2}, "the step that runs is not disturbed"
        go_on.set()
        wait_until(lambda: set(backend.requests) == {2})
        assert wire.refused(lambda: wire.decode(1))[0] == NOT_FOUND
        assert wire.finish(wire.decode(2)) == {2: "lmnop"}

    def test_a_deadline_that_passes_during_prefill_frees_the_new_requests(self, wire, backend):
        backend.before_step = lambda ids: time.sleep(0.3)
        prompt = pb.PrefillRequest(batch=pb.Batch(id=1, requests=[wire.request(1, "a")]))
        code, _ = wire.refused(lambda: wire.stub.Prefill(prompt, timeout=0.1))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: backend.num_steps == 1 and not backend.requests)
        assert wire.finish(wire.prefill(1, wire.request(1, "a", 2))) == {1: "bc"}

    def test_a_call_cancelled_while_it_waits_for_another_step_runs_none(self, wire, backend):
        entered, go_on = threading.Event(), threading.Event()
        backend.before_step = lambda ids: (entered.set(), go_on.wait(10))
        first = wire.stub.Prefill.future(pb.PrefillRequest(batch=pb.Batch(id=1, requests=[wire.request(1, "a", 1)])))
        assert entered.wait(5)
        second = wire.stub.Prefill.future(pb.PrefillRequest(batch=pb.Batch(id=2, requests=[wire.request(2, "a", 1)])))
        time.sleep(0.05)
        second.cancel()
        time.sleep(0.05)
        go_on.set()
        assert first.result(5).generations[0].generated_text.text == "b"
        wire.clear()
        assert backend.num_steps == 1

    def test_a_client_that_dies_between_two_calls_is_noticed_in_the_end(
        self, backend, make_tokenizer, serving, tmp_path
    ):
        with serving(backend, make_tokenizer(), tmp_path, abandoned_batch_timeout_s=0.5) as served:
            wire = served.wire
            wire.prefill(1, wire.request(1, "a"))
            active = wire.prefill(2, wire.request(2, "a", 200, stopping_parameters={"ignore_eos_token": True}))
            deadline_s = time.monotonic() + 5
            while 1 in backend.requests:
                assert time.monotonic() < deadline_s
                active = wire.decode(active.batch)
                time.sleep(0.05)
            assert set(backend.requests) == {2}, "a batch that is asked for is not abandoned"


class TestHealth:
    def test_health_answers_while_a_long_step_runs_and_fails_when_it_takes_too_long(
        self, backend, make_tokenizer, serving, tmp_path
    ):
        entered, go_on = threading.Event(), threading.Event()
        backend.before_step = lambda ids: (entered.set(), go_on.wait(10))
        with serving(backend, make_tokenizer(), tmp_path, stuck_step_timeout_s=0.5) as served:
            wire = served.wire
            prompt = pb.PrefillRequest(batch=pb.Batch(id=1, requests=[wire.request(1, "a", 1)]))
            call = wire.stub.Prefill.future(prompt)
            assert entered.wait(5)
            started_s = time.monotonic()
            wire.health()
            wire.stub.Info(pb.InfoRequest(), timeout=1)
            assert time.monotonic() - started_s < 0.5
            time.sleep(0.6)
            code, details = wire.refused(wire.health)
            assert code == UNAVAILABLE
            assert "stuck" in details
            go_on.set()
            call.result(5)
            wire.health()

    def test_the_bookkeeping_is_checked_once_the_backend_is_idle_after_work(self, wire, backend):
        wire.prefill(1, wire.request(1, "a"))
        time.sleep(0.4)
        assert backend.num_integrity_checks == 0
        wire.clear()
        wait_until(lambda: backend.num_integrity_checks == 1)
        time.sleep(0.4)
        assert backend.num_integrity_checks == 1
