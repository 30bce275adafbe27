"""Keeps part of a step for short prompts behind a long one, so that they need not wait until it is computed.

Among prompts of equal length, first come, first served has the earliest first tokens. A short prompt behind a long one
loses by it: it waits for many steps of which it needs a fraction of one. So the long one leaves it some room, but never
more than a share of a step, and takes what is not used after all: no step gets shorter, and no long prompt starves.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from pagedkv.plugin.scheduler.sequence_progress import SequenceProgress

MAX_LOOKED_AT = 256
"""So many sequences behind a long prompt are looked at: a queue of any length must not slow a step down."""


def count_kept_tokens(num_tokens_left: int, share: float, behind: Iterable[SequenceProgress]) -> int:
    """Tokens of a step to keep for the prompts behind one: for those that end within a share of what is left.

    Args:
        num_tokens_left: of the step's budget.
        share: most of it to keep, 0 to 1.
        behind: sequences that come after it, oldest first.
    """
    room = int(num_tokens_left * share)
    num_kept = 0
    for sequence in islice(behind, MAX_LOOKED_AT):
        if not room:
            break
        num_tokens = sequence.num_tokens_left
        if num_tokens <= room:
            room -= num_tokens
            num_kept += num_tokens
    return num_kept
