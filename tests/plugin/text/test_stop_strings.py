"""Stop strings are found where they end first, whatever the pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedkv.plugin.text import StopStrings

LETTERS = st.text("ab", max_size=4)


@given(st.lists(LETTERS, max_size=3), st.lists(LETTERS, max_size=8))
def test_the_first_to_end_is_found_in_the_piece_in_which_it_ends(stop: list[str], pieces: list[str]) -> None:
    watch = StopStrings(stop)
    text = ""
    for piece in pieces:
        before, text = len(text), text + piece
        ends = [(end, one) for one in stop if one for end in range(len(one), len(text) + 1) if text[:end].endswith(one)]
        new = [(end, one) for end, one in ends if end > before]
        assert watch.push(piece) == (min(new)[1] if new else None)
        if new:
            return
