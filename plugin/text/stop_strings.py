"""Stop strings in a growing text, found wherever they end: also inside a token."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one sequence for its stop strings.

    >>> watch = StopStrings(["END", "no"])
    >>> watch.push("the E"), watch.push("N"), watch.push("D. not")
    (None, None, 'END')
    """

    __slots__ = ("_max_kept_chars", "_stop", "_tail")

    def __init__(self, stop: Sequence[str]) -> None:
        """Empty strings are left out: they would end everything at once."""
        self._stop = tuple(one for one in stop if one)
        self._max_kept_chars = max(map(len, self._stop), default=1) - 1
        self._tail = ""

    def push(self, text: str) -> str | None:
        """Appends to the text. Returns the stop string that ends first in it, of those that end in what is new."""
        if not self._stop or not text:
            return None
        whole = self._tail + text
        found = [(start + len(one), one) for one in self._stop if (start := whole.find(one)) >= 0]
        self._tail = whole[max(0, len(whole) - self._max_kept_chars) :] if self._max_kept_chars else ""
        return min(found)[1] if found else None
