"""Limits the time between two tokens of running streams while prompts arrive.

Each step computes only as many prompt tokens beside running streams as fit the limit, by the measured times of earlier
steps. The chunks are those of Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve"
(OSDI 2024); their size depends on the machine's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from pagedkv.plugin.backend.live_sequence import LiveSequence
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.step_plan import StepPlan

MIN_CHUNK_TOKENS = 16
"""Least prompt tokens of a step, even if streams alone take as long as the limit."""
_FIRST_CHUNK_TOKENS = 32
_USED_SHARE = 0.85
"""Share of the limit that a step may use. The rest is for unmeasured work and for steps slower than the last one."""
_MAX_GROWTH = 2.0
_MEMORY = 0.7


class StepPacer:
    """Measures a backend's steps and limits the prompt tokens beside running streams."""

    def __init__(self, max_gap_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Makes a pacer. A `max_gap_s` of 0 is no limit."""
        self._pacer = ChunkPacer(max_gap_s) if max_gap_s else None
        self._clock = clock

    def max_chunk_tokens(
        self, sequences: Mapping[RequestId, LiveSequence], only: Collection[RequestId] | None
    ) -> int | None:
        """Most prompt tokens of the next step; None if no stream runs in it, or there is no limit."""
        if self._pacer is None:
            return None
        taking_part = sequences if only is None else sequences.keys() & set(only)
        has_stream = any(sequences[id_].num_generated_tokens for id_ in taking_part)
        return self._pacer.max_chunk_tokens if has_stream else None

    @contextmanager
    def measuring(self, plan: StepPlan) -> Iterator[None]:
        """Context manager that measures the execution of a plan."""
        start = self._clock()
        yield
        if self._pacer is not None:
            num_streams = sum(row.num_tokens == 1 for row in plan.scheduled)
            self._pacer.note(num_streams, plan.num_tokens - num_streams, self._clock() - start)


class ChunkPacer:
    """Chooses how many prompt tokens a step with running streams may compute.

    >>> pacer = ChunkPacer(max_gap_s=0.1)
    >>> pacer.max_chunk_tokens
    32
    >>> pacer.note(num_streams=4, num_chunk_tokens=0, seconds=0.02)
    >>> pacer.note(num_streams=4, num_chunk_tokens=32, seconds=0.03)    # 65 ms are left, of 0.3125 ms a token
    >>> pacer.max_chunk_tokens
    64
    >>> pacer.note(num_streams=4, num_chunk_tokens=64, seconds=0.052)
    >>> pacer.max_chunk_tokens
    128
    """

    def __init__(self, max_gap_s: float) -> None:
        self._usable_s = max_gap_s * _USED_SHARE
        self._streams_s = 0.0
        """Time of a step of streams alone."""
        self._token_s = 0.0
        """Additional time of a prompt token; 0 if unknown yet."""
        self._last_chunk_tokens = 0

    @property
    def max_chunk_tokens(self) -> int:
        """Prompt tokens that the next step may compute."""
        if not self._token_s:
            return _FIRST_CHUNK_TOKENS
        fitting = (self._usable_s - self._streams_s) / self._token_s
        return max(MIN_CHUNK_TOKENS, int(min(fitting, self._last_chunk_tokens * _MAX_GROWTH)))

    def note(self, num_streams: int, num_chunk_tokens: int, seconds: float) -> None:
        """Records a step that ran: `num_streams` rows of one token and `num_chunk_tokens` of prompts."""
        if not num_chunk_tokens:
            if num_streams:
                self._streams_s = _remember(self._streams_s, seconds)
            return
        # If a step took less time than streams alone did, there are fewer of them by now, or they are faster.
        self._streams_s = min(self._streams_s, seconds)
        token_s = max(seconds - self._streams_s, seconds * 0.05) / num_chunk_tokens
        # A slower step counts at once, without averaging: contexts have grown, or the machine has other work.
        self._token_s = max(token_s, _remember(self._token_s, token_s))
        self._last_chunk_tokens = max(num_chunk_tokens, MIN_CHUNK_TOKENS)


def _remember(old: float, new: float) -> float:
    return _MEMORY * old + (1 - _MEMORY) * new if old else new
