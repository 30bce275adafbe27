"""Counts what preemptions cost, and says when they cost too much."""

from __future__ import annotations

MAX_RECOMPUTED_SHARE = 0.1
"""Of the tokens computed lately. Sequences admitted before it is reached still add to it: the tests hold the total
under 1.3 times the work without preemption."""

WINDOW_CACHES = 16
"""How long "lately" is, in tokens computed: that many times what the cache holds."""


class RecomputeMeter:
    """Tokens computed and, of these, computed again after a preemption."""

    def __init__(self, num_cache_tokens: int) -> None:
        self.num_recomputed_tokens = 0
        """Counter."""
        self._max_window_tokens = WINDOW_CACHES * num_cache_tokens
        self._num_recent_tokens = 0
        self._num_recent_recomputed_tokens = 0

    def count(self, num_tokens: int, num_recomputed_tokens: int) -> None:
        self.num_recomputed_tokens += num_recomputed_tokens
        self._num_recent_tokens += num_tokens
        self._num_recent_recomputed_tokens += num_recomputed_tokens
        # Halved, the past fades: quiet hours are no credit for a thrashing one.
        if self._num_recent_tokens > self._max_window_tokens:
            self._num_recent_tokens //= 2
            self._num_recent_recomputed_tokens //= 2

    @property
    def is_exceeded(self) -> bool:
        return self._num_recent_recomputed_tokens > MAX_RECOMPUTED_SHARE * self._num_recent_tokens
