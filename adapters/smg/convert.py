"""Between the gateway's messages and requests of the serving loop."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.plugin.errors import CapacityError, RequestError, UnsupportedRequestError
from pagedkv.plugin.interface import Capacity
from pagedkv.plugin.requests import SamplingParams
from pagedkv.plugin.serving.generation import GenerationRequest

DEFAULT_TEMPERATURE = 1.0
"""Of a request that names none: it samples."""

MAX_TOP_LOGPROBS = 20

_UNSUPPORTED_INPUTS = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")


def to_generation(
    request: pb.GenerateRequest, capacity: Capacity, trace_context: Mapping[str, str]
) -> GenerationRequest:
    """Reads a Generate call.

    Args:
        capacity: bounds an answer whose length the client leaves open.
        trace_context: see `GenerationRequest`.

    Raises:
        RequestError: a value out of its range.
        UnsupportedRequestError: a constraint or parameter that can't be honoured.
        CapacityError: prompt and answer are longer than the capacity.
    """
    for name in _UNSUPPORTED_INPUTS:
        if request.HasField(name):
            raise UnsupportedRequestError(
                f"{name} is not supported: this worker serves text, of prompts that it computes"
            )
    if request.extra_mm_inputs:
        raise UnsupportedRequestError("extra_mm_inputs is not supported: this worker serves text")
    if request.WhichOneof("input") != "tokenized":
        raise RequestError("the prompt must come as token ids (tokenized)")
    if request.data_parallel_rank != 0:
        raise RequestError(f"there is no data parallel rank {request.data_parallel_rank}; this worker is the only one")
    prompt_ids = list(request.tokenized.input_ids)
    if not prompt_ids:
        raise RequestError("the prompt has no tokens; send at least one")
    params = to_sampling_params(request.sampling_params, len(prompt_ids), capacity)
    return GenerationRequest(
        prompt_ids,
        params,
        external_id=request.request_id,
        trace_context=trace_context,
        arrived_s=time.monotonic(),
    )


def to_sampling_params(params: pb.SamplingParams, num_prompt_tokens: int, capacity: Capacity) -> SamplingParams:
    """Raises as `to_generation` does."""
    _refuse_unsupported(params)
    max_new_tokens = _choose_max_new_tokens(params, num_prompt_tokens, capacity)
    temperature = params.temperature if params.HasField("temperature") else DEFAULT_TEMPERATURE
    if not math.isfinite(temperature) or temperature < 0:
        raise RequestError(f"temperature is {temperature}; it must be a finite number of at least 0 (0 is greedy)")
    is_greedy = temperature == 0
    has_logprobs = params.HasField("logprobs")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        ignore_eos=params.ignore_eos,
        min_new_tokens=min(params.min_tokens, max_new_tokens),
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        do_sample=not is_greedy,
        temperature=1.0 if is_greedy else temperature,
        top_k=0 if is_greedy else params.top_k,
        top_p=1.0 if is_greedy else params.top_p or 1.0,
        min_p=0.0 if is_greedy else params.min_p,
        seed=params.seed % 2**64 if params.HasField("seed") else None,
        repetition_penalty=params.repetition_penalty or 1.0,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        top_n_tokens=params.logprobs if has_logprobs else 0,
        raw_logprobs=has_logprobs,
        n=params.n or 1,
    )


def _refuse_unsupported(params: pb.SamplingParams) -> None:
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        raise UnsupportedRequestError(
            f"{constraint}: constrained decoding is not supported by this worker; send the request without "
            "response_format, grammars and required tools"
        )
    if params.HasField("prompt_logprobs"):
        raise UnsupportedRequestError("prompt_logprobs is not supported by this worker; leave it out")
    if params.logit_bias:
        raise UnsupportedRequestError("logit_bias is not supported by this worker; leave it out")
    if params.HasField("truncate_prompt_tokens"):
        raise UnsupportedRequestError("truncate_prompt_tokens is not supported by this worker; shorten the prompt")
    if params.HasField("logprobs") and not 0 <= params.logprobs <= MAX_TOP_LOGPROBS:
        raise RequestError(f"logprobs is {params.logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}")


def _choose_max_new_tokens(params: pb.SamplingParams, num_prompt_tokens: int, capacity: Capacity) -> int:
    """What was asked for; left open, all that fits."""
    if params.HasField("max_tokens"):
        if params.max_tokens == 0:
            raise RequestError("max_tokens is 0; it must be at least 1")
        return int(params.max_tokens)
    room = capacity.max_total_tokens - num_prompt_tokens
    if room < 1 or num_prompt_tokens > capacity.max_input_tokens:
        raise CapacityError(
            f"the prompt has {num_prompt_tokens} tokens, at most {capacity.max_input_tokens} fit beside an answer; "
            "shorten it"
        )
    return room
