"""One sample of a Generate call on its way out: where it stops, and the messages that tell of it."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.plugin.interface import Tokenizer
from pagedkv.plugin.requests import FinishReason, SamplingParams, StepOutput
from pagedkv.plugin.text import Detokenizer, StopStrings


class SampleWriter:
    """Takes the tokens of one sample and makes its messages.

    Args:
        index: of the sample.
        params: of its request.
        prompt_ids: of its request.
        tokenizer: of the model; stop strings alone need it.
    """

    __slots__ = (
        "_detokenizer",
        "_index",
        "_logprobs",
        "_num_cached_tokens",
        "_num_prompt_tokens",
        "_num_tokens",
        "_params",
        "_stop_strings",
        "_token_ids",
        "finish_reason",
        "matched_stop",
    )

    def __init__(self, index: int, params: SamplingParams, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._index = index
        self._params = params
        self._num_prompt_tokens = len(prompt_ids)
        self._stop_strings = StopStrings(params.stop) if any(params.stop) else None
        self._detokenizer = Detokenizer(tokenizer, prompt_ids) if self._stop_strings else None
        self._num_cached_tokens = 0
        self._num_tokens = 0
        self._token_ids: list[int] = []
        self._logprobs: list[StepOutput] = []
        self.finish_reason = ""
        """As the gateway knows it: "stop", "length" or "abort"; empty while the sample runs."""
        self.matched_stop: int | str | None = None
        """The stop token or string that ended it."""

    def push(self, output: StepOutput) -> None:
        """Takes the next token, and decides whether it is the last one."""
        if self._num_tokens == 0:
            self._num_cached_tokens = output.num_cached_tokens
        token_id = output.token.token_id
        self._num_tokens += 1
        self._token_ids.append(token_id)
        if self._params.raw_logprobs:
            self._logprobs.append(output)
        matched = self._match_stop_string(token_id) if self._stop_strings is not None else None
        if matched is not None:
            self.finish_reason, self.matched_stop = "stop", matched
        elif token_id in self._params.stop_token_ids and self._num_tokens >= self._params.min_new_tokens:
            self.finish_reason, self.matched_stop = "stop", token_id
        elif output.finish_reason is not None:
            self.finish_reason = "length" if output.finish_reason is FinishReason.LENGTH else "stop"

    def take_chunk(self) -> bytes:
        """The message of the tokens that came since the last one."""
        chunk = pb.GenerateStreamChunk(
            token_ids=self._token_ids,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(self._token_ids),
            cached_tokens=self._num_cached_tokens,
            index=self._index,
        )
        if self._logprobs:
            _add_logprobs(chunk.output_logprobs, self._logprobs, self._params.top_n_tokens)
            self._logprobs = []
        self._token_ids = []
        return pb.GenerateResponse(chunk=chunk).SerializeToString()

    def take_complete(self) -> bytes:
        """The last message: with all tokens where no chunk took them."""
        complete = pb.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=self.finish_reason or "abort",
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
            cached_tokens=self._num_cached_tokens,
            index=self._index,
        )
        if isinstance(self.matched_stop, str):
            complete.matched_stop_str = self.matched_stop
        elif self.matched_stop is not None:
            complete.matched_token_id = self.matched_stop
        if self._logprobs:
            _add_logprobs(complete.output_logprobs, self._logprobs, self._params.top_n_tokens)
        return pb.GenerateResponse(complete=complete).SerializeToString()

    def _match_stop_string(self, token_id: int) -> str | None:
        if self._stop_strings is None or self._detokenizer is None:
            return None
        matched = self._stop_strings.push(self._detokenizer.push(token_id))
        return matched if self._num_tokens >= self._params.min_new_tokens else None


def _add_logprobs(message: pb.OutputLogProbs, outputs: Sequence[StepOutput], max_top_tokens: int) -> None:
    """Of equal length, entry by entry; of tokens that tie for the last place the first ones are told."""
    for output in outputs:
        assert output.raw_logprob is not None
        message.token_logprobs.append(output.raw_logprob)
        message.token_ids.append(output.token.token_id)
        top = output.top_tokens[:max_top_tokens]
        message.top_logprobs.add(values=[one.logprob for one in top], token_ids=[one.token_id for one in top])
