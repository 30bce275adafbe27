"""Input and output of a backend: requests, sampling parameters, step outputs. Tokens only, no text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from pagedkv.plugin.errors import RequestError

RequestId = NewType("RequestId", int)
"""Id of a live request in one backend: 0 ≤ id < 2**64. It may be used again after the request's end."""

_FEATURE_OF_OPTION = {
    "min_new_tokens": "min_new_tokens",
    "stop_token_ids": "stop_token_ids",
    "min_p": "min_p",
    "frequency_penalty": "output_penalties",
    "presence_penalty": "output_penalties",
    "raw_logprobs": "raw_logprobs",
}
"""Options of `SamplingParams` that version 1.0 did not have: a backend that does not know one would ignore it."""
SAMPLING_FEATURES = frozenset(_FEATURE_OF_OPTION.values())
"""What a backend names in `features` if it understands all options of `SamplingParams`."""

MAX_TOP_N_TOKENS = 1000
MAX_NEW_TOKENS = 2**31 - 1


class FinishReason(str, Enum):
    """Why a request ended. If several reasons apply in one step, the first in this order is reported."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_TOKEN = "stop_token"
    STOP_SEQUENCE = "stop_sequence"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Sampling is on when `do_sample` is set or any of `temperature`, `top_k`, `top_p`, `typical_p`, `min_p` differs from
    its default; otherwise the best token is taken. Order of operations: watermark, repetition penalty, relative
    frequency penalty, frequency and presence penalty, min_new_tokens, temperature, min_p, top_k, top_p, typical_p.

    Raises:
        RequestError: a value out of its range, NaN or infinite.
    """

    max_new_tokens: int = 128
    ignore_eos: bool = False
    min_new_tokens: int = 0
    """No end-of-sequence or stop token is chosen before so many tokens; the text layer holds back stop strings too."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request; the one that did is the last token."""
    stop: tuple[str, ...] = ()
    """Stop strings, matched literally at the end of the generated text. A backend ignores them; the text layer acts."""
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k best tokens; 0 keeps all."""
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    """Keep tokens whose probability is at least min_p × that of the best one; 0 keeps all."""
    seed: int | None = None
    """Makes the sampled tokens repeatable, whatever else is in the batch; None draws a new seed."""
    repetition_penalty: float = 1.0
    """score < 0 ? score × p : score / p for each token of prompt and output; 1.0 is off."""
    frequency_penalty: float = 0.0
    """Subtracts penalty × count of the token in the output, as OpenAI's API does; 0.0 is off."""
    presence_penalty: float = 0.0
    """Subtracts the penalty from each token that occurs in the output, as OpenAI's API does; 0.0 is off."""
    relative_frequency_penalty: float = 0.0
    """Subtracts penalty × count / length over prompt and output, as text-generation-inference does; 0.0 is off."""
    watermark: bool = False
    top_n_tokens: int = 0
    """How many of the model's best tokens are reported at each step with their log-probabilities."""
    raw_logprobs: bool = False
    """Whether outputs have the model's own log-probability of the chosen token, before penalties and warpers."""
    prefill_logprobs: bool = False
    n: int = 1
    """How many samples the engine draws from one prompt (seeds seed, seed + 1, …), sharing the prompt's blocks."""

    def __post_init__(self) -> None:
        _require(
            1 <= self.max_new_tokens <= MAX_NEW_TOKENS,
            f"max_new_tokens is {self.max_new_tokens}; it must be between 1 and {MAX_NEW_TOKENS}",
        )
        _require(
            math.isfinite(self.temperature) and self.temperature > 0,
            f"temperature is {self.temperature}; it must be a finite number above 0 (1.0 is neutral)",
        )
        _require(0 <= self.top_k < 2**32, f"top_k is {self.top_k}; it must be 0 (off) or a positive number")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1")
        _require(0 < self.typical_p <= 1, f"typical_p is {self.typical_p}; it must be above 0 and at most 1")
        _require(0 <= self.min_p <= 1, f"min_p is {self.min_p}; it must be between 0 (off) and 1")
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens is {self.min_new_tokens}; it must be between 0 and max_new_tokens ({self.max_new_tokens})",
        )
        _require(
            all(0 <= token_id < 2**32 for token_id in self.stop_token_ids),
            f"stop_token_ids is {self.stop_token_ids}; it must be a tuple of token ids",
        )
        _require(
            self.seed is None or 0 <= self.seed < 2**64, f"seed is {self.seed}; it must be between 0 and 2**64 - 1"
        )
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition_penalty is {self.repetition_penalty}; it must be a finite number above 0 (1.0 is off)",
        )
        for name in ("frequency_penalty", "presence_penalty", "relative_frequency_penalty"):
            value = getattr(self, name)
            _require(
                math.isfinite(value) and -2 <= value <= 2,
                f"{name} is {value}; it must be between -2 and 2 (0.0 is off)",
            )
        _require(
            0 <= self.top_n_tokens <= MAX_TOP_N_TOKENS,
            f"top_n_tokens is {self.top_n_tokens}; it must be between 0 and {MAX_TOP_N_TOKENS}",
        )
        _require(1 <= self.n <= 128, f"n is {self.n}; it must be between 1 and 128")

    @property
    def features(self) -> frozenset[str]:
        """What a backend must understand, beyond version 1.0, to do as these parameters say.

        >>> sorted(SamplingParams(min_p=0.1, presence_penalty=1.0).features)
        ['min_p', 'output_penalties']
        """
        return frozenset(feature for option, feature in _FEATURE_OF_OPTION.items() if getattr(self, option))

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn at random rather than taken greedily."""
        return (
            self.do_sample
            or self.temperature != 1.0
            or self.top_k != 0
            or self.top_p < 1.0
            or self.typical_p < 1.0
            or self.min_p > 0.0
        )


WORST_SAMPLING = SamplingParams(
    temperature=0.9,
    top_k=10,
    top_p=0.9,
    typical_p=0.9,
    seed=0,
    repetition_penalty=1.2,
    min_p=0.01,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    relative_frequency_penalty=0.1,
    raw_logprobs=True,
    watermark=True,
    top_n_tokens=20,
)
"""Sampling parameters with every option that costs work or memory, for the largest step of a warm-up."""


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """A namespace of the prefix cache. Blocks are shared within one namespace, never between two."""

    salt: str = ""
    """Set by trusted infrastructure, one a tenant, so that no tenant can probe another's prefixes."""
    adapter_id: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. Checked against the model's vocabulary and limits by `Backend.add`."""

    id: RequestId
    prompt_ids: Sequence[int]
    """Token ids, 0 ≤ id < vocab_size, at least one; read only."""
    params: SamplingParams
    namespace: CacheNamespace = field(default_factory=CacheNamespace)
    parent_id: RequestId | None = None
    """A live request in the same namespace to fork from. Both share the KV of their common beginning; the block that
    holds its end is copied on the first write. This only saves work: a backend without sharing computes all tokens."""

    @property
    def features(self) -> frozenset[str]:
        """What a backend must understand to answer rightly (`pagedkv.plugin.features`). None is sent what it lacks."""
        return self.params.features


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    """Natural logarithm of the probability."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One new token of one request."""

    request_id: RequestId
    token: TokenLogprob
    """The chosen token; its log-probability is taken after penalties and warpers."""
    top_tokens: tuple[TokenLogprob, ...]
    """The model's `top_n_tokens` best tokens, best first; includes ties with the last one. Equal scores are by id."""
    prefill_logprobs: tuple[float, ...] | None
    """In the first output of a request that asked for it: one a prompt token, the first is NaN. Otherwise None."""
    num_cached_tokens: int
    """Prompt tokens whose KV was found instead of computed when the request was first admitted."""
    finish_reason: FinishReason | None
    """LENGTH or EOS_TOKEN in the last output of the request, which the backend has then released; otherwise None."""
    seed: int | None
    """The seed of a request that samples, so that the run can be repeated; None for a greedy one."""
    raw_logprob: float | None = None
    """The model's own log-probability of the token, where `raw_logprobs` asked for it."""
    admitted_s: float | None = field(default=None, compare=False)
    """When a step first ran the request, of `time.monotonic`; None if the backend does not report it."""


def find_finish_reason(
    params: SamplingParams, num_generated_tokens: int, token_id: int, eos_token_ids: Sequence[int]
) -> FinishReason | None:
    """Decides whether a request ends with the token just chosen (counted in `num_generated_tokens`)."""
    if num_generated_tokens >= params.max_new_tokens:
        return FinishReason.LENGTH
    if token_id in eos_token_ids and not params.ignore_eos:
        return FinishReason.EOS_TOKEN
    if token_id in params.stop_token_ids:
        return FinishReason.STOP_TOKEN
    return None
