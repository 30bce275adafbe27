"""From a client's request to what a backend takes."""

from __future__ import annotations

import math

import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.convert import to_requests
from pagedkv.adapters.tgi.prompts import PromptEncoder, max_prompt_bytes
from pagedkv.plugin.errors import RequestError
from pagedkv.plugin.requests import SamplingParams

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0}


@pytest.fixture
def encoder(make_tokenizer):
    return PromptEncoder(make_tokenizer(), 1000)


@pytest.fixture
def bos_encoder(make_tokenizer):
    return PromptEncoder(make_tokenizer(has_bos=True), 1000)


def message(parameters=None, stopping=None, **fields):
    return pb.Request(
        **{
            "id": 5,
            "inputs": "abc",
            "truncate": 100,
            "parameters": pb.NextTokenChooserParameters(**NEUTRAL | (parameters or {})),
            "stopping_parameters": pb.StoppingCriteriaParameters(**{"max_new_tokens": 3} | (stopping or {})),
            **fields,
        }
    )


def chunks(*texts):
    return pb.Input(chunks=[pb.InputChunk(text=text) for text in texts])


def read(encoder, *messages):
    return to_requests(pb.Batch(requests=messages), encoder)


def text_of(request):
    return bytes(id_ - 2 for id_ in request.prompt_ids if id_ >= 2).decode()


def test_neutral_parameters_are_a_greedy_request(encoder):
    (request,) = read(encoder, message())
    assert request.id == 5
    assert text_of(request) == "abc"
    assert request.params == SamplingParams(max_new_tokens=3, seed=0)
    assert not request.params.is_sampled


def test_every_parameter_arrives(encoder):
    parameters = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "typical_p": 0.75,
        "do_sample": True,
        "seed": 2**64 - 1,
        "repetition_penalty": 1.5,
        "frequency_penalty": -0.5,
        "watermark": True,
    }
    stopping = {"max_new_tokens": 9, "stop_sequences": ["x", ""], "ignore_eos_token": True}
    (request,) = read(encoder, message(parameters, stopping, prefill_logprobs=True, top_n_tokens=4))
    assert request.params == SamplingParams(
        max_new_tokens=9,
        ignore_eos=True,
        stop=("x", ""),
        do_sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        typical_p=0.75,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        relative_frequency_penalty=-0.5,
        watermark=True,
        top_n_tokens=4,
        prefill_logprobs=True,
    )


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_repetition_penalty_of_0_and_1_is_off(encoder, penalty):
    (request,) = read(encoder, message({"repetition_penalty": penalty}))
    assert request.params.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("parameters", "stopping", "word"),
    [
        ({"temperature": 0.0}, {}, "temperature"),
        ({"temperature": math.nan}, {}, "temperature"),
        ({"temperature": math.inf}, {}, "temperature"),
        ({"top_p": 0.0}, {}, "top_p"),
        ({"top_p": 1.5}, {}, "top_p"),
        ({"typical_p": 0.0}, {}, "typical_p"),
        ({"repetition_penalty": -1.0}, {}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, {}, "repetition_penalty"),
        ({"frequency_penalty": -3.0}, {}, "frequency_penalty"),
        ({"grammar": "[0-9]+", "grammar_type": pb.GRAMMAR_TYPE_REGEX}, {}, "grammar"),
        ({"grammar_type": pb.GRAMMAR_TYPE_JSON}, {}, "grammar"),
        ({}, {"max_new_tokens": 0}, "max_new_tokens"),
        ({}, {"max_new_tokens": 2**31}, "max_new_tokens"),
    ],
)
def test_a_value_out_of_range_is_refused_and_the_request_named(encoder, parameters, stopping, word):
    with pytest.raises(RequestError, match=f"request 5: .*{word}"):
        read(encoder, message(), message(parameters, stopping))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"truncate": 0}, "truncate"),
        ({"adapter_id": "nope"}, "adapter"),
        ({"top_n_tokens": 60000}, "top_n_tokens"),
        ({"inputs": ""}, "no text"),
        ({"input_chunks": chunks("")}, "no text"),
        ({"input_chunks": pb.Input(chunks=[pb.InputChunk(image=pb.Image(data=b"1"))])}, "no text"),
        ({"inputs": "a" * 1001}, "1001 bytes"),
    ],
)
def test_a_field_that_can_not_be_served_is_refused(encoder, fields, word):
    with pytest.raises(RequestError, match=f"request 5: .*{word}"):
        read(encoder, message(**fields))


def test_an_empty_adapter_id_is_none(encoder):
    assert read(encoder, message(adapter_id=""))[0].namespace.adapter_id == ""


def test_a_batch_without_requests_is_refused(encoder):
    with pytest.raises(RequestError, match="no requests"):
        read(encoder)


def test_chunks_win_over_inputs_and_texts_are_joined_around_an_image(encoder):
    image = pb.InputChunk(image=pb.Image(data=b"1", mimetype="image/png"))
    both = pb.Input(chunks=[pb.InputChunk(text="x"), image, pb.InputChunk(text="yz")])
    (request,) = read(encoder, message(input_chunks=both))
    assert text_of(request) == "xyz"


def test_truncation_keeps_the_last_tokens(encoder):
    assert text_of(read(encoder, message(inputs="abcdef", truncate=2))[0]) == "ef"
    assert text_of(read(encoder, message(inputs="abcdef", truncate=6))[0]) == "abcdef"


def test_a_first_special_token_is_added_when_asked_for_and_outlives_truncation(bos_encoder):
    def ids(**fields):
        return read(bos_encoder, message(inputs="abcd", **fields))[0].prompt_ids

    a, b, c, d = (ord(letter) + 2 for letter in "abcd")
    assert ids(add_special_tokens=True) == [0, a, b, c, d]
    assert ids() == [a, b, c, d]
    assert ids(add_special_tokens=True, truncate=3) == [0, c, d]
    assert ids(truncate=3) == [b, c, d]
    assert ids(add_special_tokens=True, truncate=1) == [d]


def test_the_bound_on_text_follows_the_model_and_is_a_megabyte_at_least():
    assert max_prompt_bytes(2048) == 2**20
    assert max_prompt_bytes(2**20) == 64 * 2**20
