"""Traces whose recorded answers are faults of that server, and what is right instead."""

from __future__ import annotations

import math

import grpc
import pytest
import torch
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagedkv.adapters.tgi import generate_pb2 as pb

pytestmark = pytest.mark.slow

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND


def prompt_of(request):
    return request.input_chunks.chunks[0].text


def test_start_up_in_the_router_s_order(golden):
    padding = golden.name == "contiguous"
    for call in golden.load("00_startup"):
        if call["method"].startswith("/"):
            continue
        request, found, recorded = golden.request_of(call), golden.send(call), golden.recorded_answer(call)
        if call["method"] == "ServiceDiscovery":
            assert list(found.urls) == [golden.served.target.replace("unix:", "unix://")]
        elif call["method"] == "Info":
            assert (found.requires_padding, found.support_chunking) == (padding, not padding)
            assert (found.dtype, found.device_type) == (recorded.dtype, recorded.device_type)
            assert found.speculate == 0
            assert not found.HasField("window_size")
        elif call["method"] == "Warmup":
            assert found.HasField("max_supported_total_tokens") == (not padding)
            for limit in ("max_input_tokens", "max_total_tokens"):
                assert getattr(found, limit) > 0
                assert not request.HasField(limit) or getattr(found, limit) == getattr(request, limit)
        elif call["method"] == "Prefill":
            golden.assert_same_generation(recorded.generations[0], found.generations[0])
            assert not found.HasField("batch")
    golden.warm_up()


def test_reflection_lists_and_describes_the_service(golden):
    stub = reflection_pb2_grpc.ServerReflectionStub(golden.wire.channel)
    name = "generate.v3.TextGenerationService"
    ask = reflection_pb2.ServerReflectionRequest
    listed, described = stub.ServerReflectionInfo(iter([ask(list_services=""), ask(file_containing_symbol=name)]))
    assert name in [service.name for service in listed.list_services_response.service]
    assert described.file_descriptor_response.file_descriptor_proto


def test_a_finished_request_is_finished_even_if_nobody_filters_it_out(golden):
    recorded = golden.recorded_streams("04b_not_filtered")
    streams: dict[int, list[int]] = {}
    for call in golden.load("04b_not_filtered"):
        for generation in golden.send(call).generations:
            streams.setdefault(generation.request_id, []).extend(generation.tokens.ids)
    assert streams == {0: recorded[0].ids[:2], 1: recorded[1].ids}


def test_a_cleared_batch_is_not_found_and_others_go_on(golden):
    for call in golden.load("05_clear_cache"):
        if "error" in call:
            assert golden.refused(call) == NOT_FOUND
            continue
        found, recorded = golden.send(call), golden.recorded_answer(call)
        if call["method"] != "ClearCache":
            golden.assert_same_generation(recorded.generations[0], found.generations[0])


def test_each_row_of_a_batch_has_its_own_truncation(golden):
    streams = golden.run_trace("09b_truncate_mixed_batch")
    alone = golden.recorded_streams("09_truncate")[0]
    assert streams[0].ids == alone.ids[:4]
    golden.assert_close(alone.logprobs[:4], streams[0].logprobs)
    golden.assert_same_tokens(alone.prefill, streams[0].prefill)
    recorded = golden.recorded_streams("09b_truncate_mixed_batch")[1]
    golden.assert_same_stream(recorded, streams[1])
    golden.assert_same_tokens(recorded.prefill, streams[1].prefill)


def test_prompt_logprobs_are_one_an_id_whatever_the_rows_beside(golden):
    streams = golden.run_trace("10b_prefill_logprobs_batch")
    for request_id, recorded in golden.recorded_streams("10b_prefill_logprobs_batch").items():
        stream = streams[request_id]
        if request_id == 2:
            recorded.final.text = " 😇 "  # It ends inside a character, of which the recorded server makes "".
        golden.assert_same_stream(recorded, stream)
        assert (stream.prefill is None) == (recorded.prefill is None)
        if recorded.prefill is not None:
            num_ids = len(recorded.prefill.ids)
            assert list(stream.prefill.ids) == list(recorded.prefill.ids)
            assert list(stream.prefill.texts) == list(recorded.prefill.texts)
            right = [math.nan, *list(recorded.prefill.logprobs)[len(recorded.prefill.logprobs) - num_ids + 1 :]]
            golden.assert_close(right, list(stream.prefill.logprobs))


def test_a_repetition_penalty_counts_prompt_and_generated_tokens_and_no_padding(golden):
    streams = golden.run_trace("12b_repetition_penalty_batch")
    recorded = golden.recorded_streams("12b_repetition_penalty_batch")
    golden.assert_same_stream(golden.recorded_streams("12_repetition_penalty")[0], streams[0])
    golden.assert_same_stream(recorded[1], streams[1])
    golden.assert_same_stream(recorded[2], streams[2])


@pytest.mark.parametrize("trace", ["13_frequency_penalty", "13b_frequency_penalty_negative"])
def test_a_frequency_penalty_subtracts_by_count_over_length(golden, logits_after, trace):
    prefill = golden.request_of(golden.load(trace)[0])
    streams = golden.run_to_end(prefill)
    for request in prefill.batch.requests:
        stream = streams[request.id]
        prompt_ids = golden.served.tokenizer.encode(prompt_of(request))
        for i, logits in enumerate(logits_after(prompt_ids, stream.ids)):
            seen = torch.tensor(prompt_ids + stream.ids[:i])
            counts = torch.bincount(seen, minlength=len(logits))
            expected = logits - request.parameters.frequency_penalty * counts / len(seen)
            assert stream.ids[i] == expected.argmax()
            assert stream.logprobs[i] == pytest.approx(expected.log_softmax(0).max().item(), abs=1e-3)


def test_an_output_that_ends_inside_a_character_keeps_its_whole_ones(golden):
    recorded = golden.recorded_streams("18e_ends_mid_char")
    streams = golden.run_trace("18e_ends_mid_char")
    assert {i: s.texts for i, s in streams.items()} == {i: s.texts for i, s in recorded.items()}
    assert {i: s.ids for i, s in streams.items()} == {i: s.ids for i, s in recorded.items()}
    assert {i: s.final.text for i, s in streams.items()} == {0: " 😇 😊 ", 1: "香", 2: ""}


def test_a_short_prompt_s_multi_byte_answer_streams_as_it_does_beside_longer_ones(golden):
    right = {}
    for request in golden.request_of(golden.load("18i_short_prompt_multibyte_batch")[0]).batch.requests:
        right[prompt_of(request)] = golden.recorded_streams("18i_short_prompt_multibyte_batch")[request.id]
    num_compared = 0
    for call in golden.load("18h_short_prompt_multibyte"):
        if call["method"] == "Prefill":
            prefill = golden.request_of(call)
            (stream,) = golden.run_to_end(prefill).values()
            assert "".join(stream.texts).startswith(stream.final.text.rstrip("\ufffd"))
            if (prompt := prompt_of(prefill.batch.requests[0])) in right:
                golden.assert_same_stream(right[prompt], stream)
                num_compared += 1
    assert num_compared >= 5


def test_a_prompt_of_one_character_streams_its_answer(golden):
    (recorded,) = golden.recorded_streams("18f_prompt_ends_mid_char").values()
    (stream,) = golden.run_trace("18f_prompt_ends_mid_char").values()
    golden.assert_same_stream(recorded, stream)


@pytest.mark.parametrize("trace", ["20b_inputs_only", "20c_two_text_chunks"])
def test_inputs_without_chunks_and_several_text_chunks_are_a_prompt(golden, trace):
    (stream,) = golden.run_trace(trace).values()
    assert stream.final.text == " Paris"


def test_a_request_with_an_image_alone_ends_alone(golden):
    prefill = golden.request_of(golden.load("20d_image_only")[0])
    request = prefill.batch.requests[0]
    request.input_chunks.chunks.append(pb.InputChunk(image=pb.Image(data=b"\x89PNG", mimetype="image/png")))
    assert "text" in golden.wire.ended_early(request)[request.id]


@pytest.mark.parametrize("trace", ["21c_empty_batch", "21g_prefill_missing_batch"])
def test_a_batch_without_requests_is_invalid(golden, trace):
    call = golden.load(trace)[0]
    code, details = golden.wire.refused(lambda: golden.send(call))
    assert code == INVALID
    assert "no requests" in details


@pytest.mark.parametrize(
    ("trace", "word"),
    [
        ("09d_truncate_zero", "truncate"),
        ("20d_image_only", "text"),
        ("20e_empty_text", "text"),
        ("21f_default_parameters", "temperature"),
        ("21f2_top_p_zero", "top_p"),
        ("21f3_typical_p_zero", "typical_p"),
        ("21f4_repetition_penalty_negative", "repetition_penalty"),
        ("21j_top_n_huge", "top_n_tokens"),
        ("22b_grammar_json_type", "grammar"),
        ("22c_grammar_json_regex", "grammar"),
        ("22d_grammar_invalid", "grammar"),
        ("22e_grammar_sampling_stop", "grammar"),
    ],
)
def test_a_wrong_request_ends_alone_and_is_told_what_to_change(golden, trace, word):
    prefill = golden.request_of(golden.load(trace)[0])
    texts = golden.wire.ended_early(*prefill.batch.requests)
    assert set(texts) == {request.id for request in prefill.batch.requests}
    assert all(word in text for text in texts.values())


@pytest.mark.parametrize("trace", ["20f_empty_text_in_batch", "22a_grammar_regex"])
def test_a_wrong_request_ends_alone_and_the_ones_beside_it_are_served(golden, trace):
    prefill = golden.request_of(golden.load(trace)[0])
    wrong = [request.id for request in prefill.batch.requests if not prompt_of(request) or request.parameters.grammar]
    streams = golden.run_to_end(prefill)
    assert 0 < len(wrong) < len(streams)
    for request_id, stream in streams.items():
        assert ("was refused" in stream.final.text) == (request_id in wrong)


@pytest.mark.parametrize(
    "trace", ["21d_max_new_tokens_0", "21d2_max_new_tokens_0_mixed", "21f6_no_stopping_parameters"]
)
def test_an_output_of_no_tokens_is_one_of_one_token(golden, trace):
    prefill = golden.request_of(golden.load(trace)[0])
    streams = golden.run_to_end(prefill)
    for request in prefill.batch.requests:
        if not request.stopping_parameters.max_new_tokens:
            assert len(streams[request.id].ids) == 1
            assert streams[request.id].final.finish_reason == pb.FINISH_REASON_LENGTH


def test_an_adapter_that_is_not_loaded_is_passed_over(golden):
    prefill = golden.request_of(golden.load("21i_adapter_id")[0])
    (named,) = golden.run_to_end(prefill).values()
    prefill.batch.requests[0].ClearField("adapter_id")
    (plain,) = golden.run_to_end(prefill).values()
    golden.assert_same_stream(plain, named)


def test_extreme_parameters_give_numbers_and_leave_the_row_beside_as_it_is(golden):
    text = "The capital of France is"
    extremes = [
        {"temperature": math.inf, "do_sample": True},
        {"temperature": 1e-39, "do_sample": True, "repetition_penalty": math.inf},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": 1e-39},
        {"frequency_penalty": math.inf},
        {"temperature": math.inf, "repetition_penalty": math.inf, "frequency_penalty": -math.inf, "top_k": 5},
        {"temperature": math.inf, "repetition_penalty": 1e-39, "typical_p": 0.5, "top_p": 0.5},
    ]
    (alone,) = golden.run_to_end(pb.PrefillRequest(batch=pb.Batch(requests=[golden.wire.request(0, text, 8)]))).values()
    requests = [golden.wire.request(0, text, 8)]
    requests += [golden.wire.request(i, text, 8, parameters=extreme) for i, extreme in enumerate(extremes, 1)]
    streams = golden.run_to_end(pb.PrefillRequest(batch=pb.Batch(requests=requests)))
    assert streams[0].ids == alone.ids
    golden.assert_close(alone.logprobs, streams[0].logprobs)
    assert all(math.isfinite(logprob) for stream in streams.values() for logprob in stream.logprobs)
    vocab_size = golden.served.backend.info.model.vocab_size
    assert streams[1].logprobs == pytest.approx([-math.log(vocab_size)] * 8, abs=1e-3), "all tokens alike"


@pytest.mark.parametrize("beside", [False, True])
def test_the_logprobs_of_a_prompt_of_one_token_are_one_nan(golden, beside):
    request = golden.wire.request(1, "The capital of France", 1, truncate=1, prefill_logprobs=True)
    others = [golden.wire.request(2, "The capital of France", 1, prefill_logprobs=True)] if beside else []
    for generation in golden.wire.prefill(1, request, *others).generations:
        assert len(generation.prefill_tokens.logprobs) == len(generation.prefill_tokens.ids)
        assert math.isnan(generation.prefill_tokens.logprobs[0])


def test_a_wrong_size_of_a_batch_is_ignored(golden):
    call = golden.load("21e3_wrong_size_two")[0]
    assert [g.request_id for g in golden.send(call).generations] == [0, 1]


def test_unknown_batches_and_requests_are_not_found_and_no_batch_is_lost(golden):
    codes = []
    for call in golden.load("21a_errors_unknown"):
        if call["method"] == "Prefill":
            golden.wire.clear()  # The recorded server has lost the batch before; here its request ids are still live.
        try:
            golden.send(call)
            codes.append("ok")
        except grpc.RpcError as error:
            codes.append(error.code().name)
    no, bad = "NOT_FOUND", "INVALID_ARGUMENT"
    assert codes == [
        *(no, bad, no),  # Decode of an unknown batch and of none, FilterBatch of an unknown one
        *("ok", no, "ok"),  # FilterBatch of an unknown request; the batch decodes
        *("ok", bad, "ok"),  # FilterBatch to nobody; the batch decodes
        *("ok", no, "ok", no, "ok"),  # FilterBatch of unknown requests, Decode of a known and an unknown batch
        *("ok", bad, "ok"),  # Decode of one batch twice
        *("ok", "ok"),  # a batch is named by its id; what else a client says of it is ignored
    ]


def test_an_unknown_method_is_unimplemented(golden):
    call = golden.wire.channel.unary_unary("/generate.v3.TextGenerationService/Nope")
    assert golden.wire.refused(lambda: call(b""))[0] == grpc.StatusCode.UNIMPLEMENTED


def test_a_prompt_over_the_limit_ends_alone_unless_truncation_makes_it_fit(golden):
    fits, _, too_long, _ = golden.load("21k_huge_prompt")
    (stream,) = golden.run_to_end(golden.request_of(fits)).values()
    assert stream.final.text == " hello world"
    (request,) = golden.request_of(too_long).batch.requests
    assert "the limit is" in golden.wire.ended_early(request)[request.id]


def test_the_server_lives_after_what_ended_the_recorded_one(golden):
    first, unprompted, *decodes = golden.load("21l_after_fatal")
    golden.send(first)
    assert golden.send(unprompted).generations[0].generated_text.text == " Paris"
    assert [golden.send(call).generations[0].tokens.texts[0] for call in decodes] == [".", "\n"]
