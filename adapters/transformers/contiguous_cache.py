"""Keys and values of a left-padded batch, in memory reserved for the longest answer.

One layer, three rows of which the second has the fewest tokens; columns are aligned at the newest token:

    column:  0  1  2  3  4  5 | 6 ...  max_columns
    row 0    a0 a1 a2 a3 a4 a5|
    row 1    .  .  .  b0 b1 b2|           reserved, not written yet
    row 2    .  c0 c1 c2 c3 c4|

A step writes its tokens in place at the next columns, without copying old ones. To add or remove rows, the remaining
rows are copied one layer after the other, so that at most one layer exists twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class ReservedLayer(DynamicLayer):
    """One layer: `keys` and `values` are views of the written columns, [num_rows, num_kv_heads, num_columns, dim]."""

    # transformers sets them to None until the first update
    keys: Any
    values: Any

    def __init__(self, max_columns: int) -> None:
        super().__init__()
        self._max_columns = max_columns
        self._rooms: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_reserved_bytes(self) -> int:
        return sum(room.nbytes for room in self._rooms or ())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [num_rows, num_kv_heads, num_tokens, dim] at the next columns; returns all written columns."""
        start = self.get_seq_length()
        self._write(key_states, value_states, start, start + key_states.shape[-2])
        return self.keys, self.values

    def release(self) -> None:
        """Frees the memory."""
        self._rooms = self.keys = self.values = None
        self.is_initialized = False

    def fill(self, parts: Sequence[tuple[ReservedLayer, torch.Tensor]], num_columns: int) -> None:
        """Copies rows, [num_rows] int64, of other layers, aligned at their newest columns and cut or padded on the
        left."""
        padded = [
            [_align_right(states.index_select(0, rows), num_columns) for states in (layer.keys, layer.values)]
            for layer, rows in parts
        ]
        keys, values = (torch.cat(states) if len(states) > 1 else states[0] for states in zip(*padded, strict=True))
        self._write(keys, values, 0, num_columns)

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor, start: int, stop: int) -> None:
        if self._rooms is None:
            self._rooms = self._reserve(key_states), self._reserve(value_states)
            self.is_initialized = True
        key_room, value_room = self._rooms
        assert stop <= self._max_columns
        key_room[:, :, start:stop] = key_states
        value_room[:, :, start:stop] = value_states
        self.keys, self.values = key_room[:, :, :stop], value_room[:, :, :stop]

    def _reserve(self, states: torch.Tensor) -> torch.Tensor:
        num_rows, num_heads, _, dim = states.shape
        return states.new_empty(num_rows, num_heads, self._max_columns, dim)


def _align_right(states: torch.Tensor, num_columns: int) -> torch.Tensor:
    # zeros, not whatever was in memory: a masked value still counts when it is NaN
    num_missing = num_columns - states.shape[-2]
    if num_missing <= 0:
        return states[:, :, -num_missing:]
    return torch.nn.functional.pad(states, (0, 0, num_missing, 0))


class ReservedCache(Cache):
    """The cache of all layers of a batch; the `past_key_values` of transformers."""

    layers: list[ReservedLayer]

    def __init__(self, num_layers: int, max_columns: int) -> None:
        super().__init__(layers=[ReservedLayer(max_columns) for _ in range(num_layers)])
        self.max_columns = max_columns

    @property
    def num_columns(self) -> int:
        return self.layers[0].get_seq_length()

    @property
    def num_reserved_bytes(self) -> int:
        return sum(layer.num_reserved_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class CacheRows:
    """Some rows of a cache."""

    cache: ReservedCache
    rows: torch.Tensor
    """[num_rows] int64, on the cache's device."""
    is_last_use: bool
    """Whether the cache is not needed afterwards, so that its layers are freed while they are copied."""


def gather_rows(parts: Sequence[CacheRows], num_columns: int) -> ReservedCache:
    """Makes one cache with copies of all the rows, in their order, `num_columns` wide."""
    first = parts[0].cache
    gathered = ReservedCache(len(first.layers), first.max_columns)
    for index, layer in enumerate(gathered.layers):
        layer.fill([(part.cache.layers[index], part.rows) for part in parts], num_columns)
        for part in parts:
            if part.is_last_use:
                part.cache.layers[index].release()
    return gathered
