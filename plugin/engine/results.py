"""What the Python API returns."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.plugin.requests import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The continuation of one prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    """Generated tokens; an end-of-sequence token is among them."""
    text: str
    """Without special tokens; a stop string that ended it is included."""
    finish_reason: FinishReason
    """Equal to "length", "eos_token" or "stop_sequence"."""
    logprobs: list[float]
    """One a generated token, natural logarithm."""
    top_tokens: list[tuple[TokenLogprob, ...]]
    """One tuple a generated token; empty ones where `top_n_tokens` is 0."""
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
    """For `n` above 1: all samples of the prompt, this one without its samples first."""


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """One token of a stream."""

    token_id: int
    text: str
    """What this token completes; empty inside a multi-byte character."""
    logprob: float
    result: GenerationResult | None
    """In the last piece."""


@dataclass(frozen=True, slots=True)
class Beam:
    """One hypothesis of a beam search."""

    token_ids: list[int]
    text: str
    score: float
    """Sum of the log-probabilities / number of generated tokens ** length_penalty."""
