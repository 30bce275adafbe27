"""Measures the share of recomputed tokens, and reports when preemptions cost too much."""

from __future__ import annotations

MAX_RECOMPUTED_SHARE = 0.1
"""Limit of the share of recomputed tokens in the window. Sequences admitted before the limit is reached still add to
it: tests check that the total stays under 1.3 times the work without preemption."""

WINDOW_CACHES = 16
"""Length of the window: this many times the tokens that the cache holds."""


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
        # Halve old counts, so that a long time without preemptions does not hide later ones.
        if self._num_recent_tokens > self._max_window_tokens:
            self._num_recent_tokens //= 2
            self._num_recent_recomputed_tokens //= 2

    @property
    def is_exceeded(self) -> bool:
        return self._num_recent_recomputed_tokens > MAX_RECOMPUTED_SHARE * self._num_recent_tokens
