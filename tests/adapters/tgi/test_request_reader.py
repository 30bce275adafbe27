"""From a message of a client to the request that a backend takes."""

from __future__ import annotations

import math

import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.prompts import PromptEncoder, max_prompt_bytes
from pagedkv.adapters.tgi.request_reader import fit_output, to_request
from pagedkv.plugin.errors import RequestError
from pagedkv.plugin.interface import Capacity
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


def read(encoder, one):
    return to_request(one, encoder)


def text_of(request):
    return bytes(id_ - 2 for id_ in request.prompt_ids if id_ >= 2).decode()


def test_neutral_parameters_are_a_greedy_request(encoder):
    request = read(encoder, message())
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
    request = read(encoder, message(parameters, stopping, prefill_logprobs=True, top_n_tokens=4))
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
    request = read(encoder, message({"repetition_penalty": penalty}))
    assert request.params.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("parameters", "stopping", "word"),
    [
        ({"temperature": 0.0}, {}, "temperature"),
        ({"temperature": math.nan}, {}, "temperature"),
        ({"top_p": 0.0}, {}, "top_p"),
        ({"top_p": math.nan}, {}, "top_p"),
        ({"typical_p": 0.0}, {}, "typical_p"),
        ({"repetition_penalty": -1.0}, {}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, {}, "repetition_penalty"),
        ({"frequency_penalty": -3.0}, {}, "frequency_penalty"),
        ({"frequency_penalty": math.nan}, {}, "frequency_penalty"),
        ({"grammar": "[0-9]+", "grammar_type": pb.GRAMMAR_TYPE_REGEX}, {}, "grammar"),
        ({"grammar_type": pb.GRAMMAR_TYPE_JSON}, {}, "grammar"),
    ],
)
def test_a_value_out_of_range_is_refused_and_the_request_named(encoder, parameters, stopping, word):
    with pytest.raises(RequestError, match=f"request 5: .*{word}"):
        read(encoder, message(parameters, stopping))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"truncate": 0}, "truncate"),
        ({"top_n_tokens": 60000}, "top_n_tokens"),
        ({"inputs": ""}, "no text"),
        ({"input_chunks": chunks("")}, "no text"),
        ({"input_chunks": pb.Input(chunks=[pb.InputChunk(image=pb.Image(data=b"1"))])}, "no text"),
        ({"inputs": "a" * 1001, "truncate": 1000}, "1001 bytes"),
    ],
)
def test_a_field_that_can_not_be_served_is_refused(encoder, fields, word):
    with pytest.raises(RequestError, match=f"request 5: .*{word}"):
        read(encoder, message(**fields))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"temperature": math.inf}, {"temperature": 1e30}),
        ({"repetition_penalty": math.inf}, {"repetition_penalty": 1e30}),
        ({"repetition_penalty": 1e-39}, {"repetition_penalty": 1e-30}),
        ({"frequency_penalty": math.inf}, {"relative_frequency_penalty": 2.0}),
        ({"frequency_penalty": -math.inf}, {"relative_frequency_penalty": -2.0}),
        ({"top_p": 1.5}, {"top_p": 1.0}),
        ({"typical_p": math.inf}, {"typical_p": 1.0}),
    ],
)
def test_what_means_as_much_as_possible_is_as_much_as_possible(encoder, parameters, expected):
    params = read(encoder, message(parameters)).params
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(("asked", "found"), [(0, 1), (1, 1), (2**31, 2**31 - 1), (2**32 - 1, 2**31 - 1)])
def test_an_output_of_no_tokens_is_one_token_and_an_endless_one_ends(encoder, asked, found):
    assert read(encoder, message(stopping={"max_new_tokens": asked})).params.max_new_tokens == found


@pytest.mark.parametrize(("asked", "found"), [(10, 10), (20, 17), (2**31 - 1, 17)])
def test_an_output_is_as_long_as_fits_beside_the_prompt(encoder, asked, found):
    request = read(encoder, message(stopping={"max_new_tokens": asked}))
    assert fit_output(request, Capacity(64, 19, 20, 4)).params.max_new_tokens == found


def test_a_prompt_that_leaves_no_room_is_left_to_the_backend_to_refuse(encoder):
    request = read(encoder, message(inputs="a" * 30))
    assert fit_output(request, Capacity(64, 19, 20, 4)).params.max_new_tokens == 1


@pytest.mark.parametrize("adapter_id", ["", "nope", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_an_adapter_that_is_not_loaded_is_passed_over(encoder, adapter_id):
    assert read(encoder, message(adapter_id=adapter_id)) == read(encoder, message())


class TestLongTexts:
    """Of texts over the limit only the end is tokenized."""

    def test_truncation_is_as_of_the_whole_text(self, bos_encoder):
        text = "".join(chr(ord("a") + i % 26) for i in range(5000))
        assert text_of(read(bos_encoder, message(inputs=text, truncate=100))) == text[-100:]
        found = read(bos_encoder, message(inputs=text, truncate=100, add_special_tokens=True)).prompt_ids
        assert list(found) == [0, *(ord(letter) + 2 for letter in text[-99:])]

    def test_a_cut_through_a_character_drops_it(self, encoder):
        text = "é" * 3001
        request = read(encoder, message(inputs="x" + text, truncate=10))
        assert bytes(id_ - 2 for id_ in request.prompt_ids).decode() == "é" * 5

    def test_more_of_a_text_of_long_tokens_is_tokenized_until_truncation_has_enough(self, make_tokenizer):
        class WordTokenizer(make_tokenizer):
            def encode(self, text, add_special_tokens=True):
                sizes.append(len(text))
                return [len(word) for word in text.split()]

        sizes = []
        encoder = PromptEncoder(WordTokenizer(), 2**22)
        sizes.clear()
        words = "w" * 8191 + " "
        assert encoder.encode(5, words * 1000, 100, False) == [8191] * 100
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[-1] <= 2**22

    def test_one_that_truncation_does_not_shorten_is_refused(self, make_tokenizer):
        encoder = PromptEncoder(make_tokenizer(), 2**17)
        with pytest.raises(RequestError, match=r"request 5: .*lower truncate"):
            encoder.encode(5, "a" * (2**17 + 1), 2**17, False)


def test_chunks_win_over_inputs_and_texts_are_joined_around_an_image(encoder):
    image = pb.InputChunk(image=pb.Image(data=b"1", mimetype="image/png"))
    both = pb.Input(chunks=[pb.InputChunk(text="x"), image, pb.InputChunk(text="yz")])
    request = read(encoder, message(input_chunks=both))
    assert text_of(request) == "xyz"


def test_truncation_keeps_the_last_tokens(encoder):
    assert text_of(read(encoder, message(inputs="abcdef", truncate=2))) == "ef"
    assert text_of(read(encoder, message(inputs="abcdef", truncate=6))) == "abcdef"


def test_a_first_special_token_is_added_when_asked_for_and_outlives_truncation(bos_encoder):
    def ids(**fields):
        return read(bos_encoder, message(inputs="abcd", **fields)).prompt_ids

    a, b, c, d = (ord(letter) + 2 for letter in "abcd")
    assert ids(add_special_tokens=True) == [0, a, b, c, d]
    assert ids() == [a, b, c, d]
    assert ids(add_special_tokens=True, truncate=3) == [0, c, d]
    assert ids(truncate=3) == [b, c, d]
    assert ids(add_special_tokens=True, truncate=1) == [d]


def test_the_bound_on_text_follows_the_model_and_is_a_megabyte_at_least():
    assert max_prompt_bytes(2048) == 2**20
    assert max_prompt_bytes(2**20) == 64 * 2**20
