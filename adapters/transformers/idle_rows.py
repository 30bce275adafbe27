"""Which running rows of the contiguous backend belong to a client that asks for no step any more.

By steps and not by time, as in the paged backend's scheduler: a request that found no room in MAX_STEPS_IN_VAIN steps
has seen which others were named meanwhile. Running rows that were not are idle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pagedkv.plugin.requests import RequestId

from .contiguous_batch import LiveRow

MAX_STEPS_IN_VAIN = 32


class IdleRows:
    """Counts the steps in which somebody waited in vain, and who was named in them."""

    def __init__(self) -> None:
        self._num_steps_in_vain = 0
        self._named: set[RequestId] = set()

    def note_step(self, ids: Collection[RequestId], *, is_anybody_waiting: bool, has_found_no_room: bool) -> None:
        """Notes a step of these requests.

        Args:
            is_anybody_waiting: of all requests.
            has_found_no_room: whether one of these waits, and can't be admitted.
        """
        if not is_anybody_waiting:
            self._begin_anew()
        if has_found_no_room:
            self._num_steps_in_vain += 1
        if self._num_steps_in_vain:
            self._named.update(ids)

    def find(self, running: Sequence[LiveRow]) -> list[LiveRow]:
        """Returns the idle rows once somebody has waited long enough, and begins to count anew."""
        if self._num_steps_in_vain < MAX_STEPS_IN_VAIN:
            return []
        idle = [row for row in running if row.id not in self._named]
        self._begin_anew()
        return idle

    def _begin_anew(self) -> None:
        self._num_steps_in_vain = 0
        self._named.clear()
