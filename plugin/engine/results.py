"""Result types of the Python API."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.plugin.requests import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The continuation of one prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    """Generated tokens, including an end-of-sequence token."""
    text: str
    """The text without special tokens, including a stop string that ended it."""
    finish_reason: FinishReason
    """Equal to "length", "eos_token" or "stop_sequence"."""
    logprobs: list[float]
    """One a generated token, natural logarithm."""
    top_tokens: list[tuple[TokenLogprob, ...]]
    """One tuple a generated token; empty tuples if `top_n_tokens` is 0."""
    prefill_logprobs: tuple[float, ...] | None
    num_cached_tokens: int
    """Prompt tokens whose KV was found instead of computed."""
    seed: int | None
    """Repeats a sampled result; None for a greedy one."""
    ttft_s: float
    """Seconds from the call to the first token."""
    tpot_s: float
    """Mean seconds a token after the first; 0 for a single token."""
    samples: tuple[GenerationResult, ...] = ()
    """For `n` above 1: all samples of the prompt; the first one is this result without `samples`."""


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """One token of a stream."""

    token_id: int
    text: str
    """The text that this token completes; empty inside a multi-byte character."""
    logprob: float
    result: GenerationResult | None
    """Set in the last piece."""


@dataclass(frozen=True, slots=True)
class Beam:
    """One hypothesis of a beam search."""

    token_ids: list[int]
    text: str
    score: float
    """Sum of the log-probabilities / number of generated tokens ** length_penalty."""
