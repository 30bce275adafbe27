"""Writes the answers to Prefill and Decode: the message, and the metadata that trails it."""

from __future__ import annotations

import time
from typing import TypeVar

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.batch_runner import StepResult
from pagedkv.adapters.tgi.convert import EndMarks, to_cached_batch, to_early_end, to_generation
from pagedkv.adapters.tgi.prompts import TokenTexts

CACHED_TOKENS_METADATA = "pagedkv-cached-tokens"
"""Trailing metadata key of Prefill and Decode answers: "REQUEST_ID=NUM_TOKENS" for each request whose first token is in
the answer, the prompt tokens that were found in the prefix cache. Left out when there are more than
MAX_METADATA_ENTRIES entries, because peers refuse large headers."""

REFUSED_METADATA = "pagedkv-refused"
"""Trailing metadata key of Prefill and Decode answers: "REQUEST_ID=REASON" for each request that the answer ends
because it was refused or failed; the first MAX_METADATA_ENTRIES of them."""

MAX_METADATA_ENTRIES = 16

Answer = TypeVar("Answer", pb.PrefillResponse, pb.DecodeResponse)


class AnswerWriter:
    """Turns the results of steps into answers.

    Args:
        texts: says which tokens are special.
        marks: how requests are ended that got no token.
        tells_cached_tokens: whether the metadata says what the prefix cache held.
    """

    def __init__(self, texts: TokenTexts, marks: EndMarks, tells_cached_tokens: bool) -> None:
        self._special_ids = texts.special_ids
        self._marks = marks
        self._tells_cached_tokens = tells_cached_tokens

    def write(self, response: Answer, result: StepResult, started_ns: int) -> Answer:
        """Fills in an answer to a call that began at `started_ns` of time.perf_counter_ns."""
        converting_ns = time.perf_counter_ns()
        response.generations.extend([to_generation(token, self._special_ids) for token in result.tokens])
        response.generations.extend([to_early_end(end, self._marks) for end in result.early_ends])
        if result.batch is not None:
            response.batch.CopyFrom(to_cached_batch(result.batch))
        if result.join_ns is not None:
            response.concat_ns = result.join_ns
        ended_ns = time.perf_counter_ns()
        response.forward_ns = result.forward_ns
        response.decode_ns = result.text_ns + ended_ns - converting_ns
        response.total_ns = ended_ns - started_ns
        return response

    def trailers(self, result: StepResult) -> list[tuple[str, str]]:
        """The metadata that goes with an answer."""
        refused = [(REFUSED_METADATA, f"{end.request_id}={end.reason}") for end in result.early_ends]
        cached = [
            (CACHED_TOKENS_METADATA, f"{token.request_id}={token.output.num_cached_tokens}")
            for token in result.tokens
            if token.is_first and self._tells_cached_tokens
        ]
        return [*refused[:MAX_METADATA_ENTRIES], *(cached if len(cached) <= MAX_METADATA_ENTRIES else [])]
