"""Finds sequences that hold blocks although nobody asks for them any more, while others need room.

A client that hangs, or died, leaves its sequences behind as they are: by the rule of age alone a younger sequence would
wait for them for ever. What decides is the order of calls, not a clock, because shards must decide alike. A sequence
that asks in vain for MAX_STEPS_IN_VAIN steps has seen who was named meanwhile: whoever runs and was not is idle. With
many clients, each of which asks in its turn, this takes as many rounds: a client that is only slow is spared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedkv.plugin.scheduler.sequence_progress import SequenceProgress

MAX_STEPS_IN_VAIN = 32


def note_named(sequences: Iterable[SequenceProgress], step: int) -> None:
    """Notes that a step was asked for these."""
    for sequence in sequences:
        sequence.last_named_step = step
        sequence.is_idle = False


def note_in_vain(sequence: SequenceProgress, running: Sequence[SequenceProgress], step: int) -> None:
    """Notes that a sequence found no room in a step; often enough in a row, it marks those as idle that hold it."""
    if not sequence.num_steps_in_vain:
        sequence.in_vain_since_step = step
    sequence.num_steps_in_vain += 1
    if sequence.num_steps_in_vain < MAX_STEPS_IN_VAIN:
        return
    sequence.num_steps_in_vain = 0
    for other in running:
        other.is_idle = other.is_idle or other.last_named_step < sequence.in_vain_since_step


def find_idle(running: Sequence[SequenceProgress]) -> SequenceProgress | None:
    """The newest idle one of some sequences, which are in order of arrival."""
    return next((sequence for sequence in reversed(running) if sequence.is_idle), None)
