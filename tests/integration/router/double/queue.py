"""One queue, first come first served, whose front keeps everybody behind it waiting."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pagedkv.adapters.tgi import generate_pb2 as pb

from .blocks import Allocation, Allocator, BlockList, RadixTree
from .streams import Stream
from .validation import ValidRequest


@dataclass
class Entry:
    """A piece of a client's answer: one request to the server."""

    id: int
    request: ValidRequest
    stream: Stream
    allocation: Allocation | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def max_new_tokens(self) -> int:
        return self.request.message.stopping_parameters.max_new_tokens


@dataclass
class NewBatch:
    message: pb.Batch
    entries: dict[int, Entry]


class Queue:
    """Entries that wait, and the blocks that they wait for."""

    def __init__(self, info: pb.InfoResponse, max_batch_total_tokens: int) -> None:
        self._info = info
        self._entries: deque[Entry] = deque()
        self.next_id = self._next_batch_id = 0
        self._allocator: Allocator | None = None
        if not info.requires_padding:
            num_blocks = max_batch_total_tokens // info.block_size
            if info.use_prefix_caching:
                self._allocator = RadixTree(num_blocks, info.block_size)
            else:
                window_size = info.window_size if info.HasField("window_size") else None
                self._allocator = BlockList(num_blocks, info.block_size, window_size)

    def append(self, request: ValidRequest, stream: Stream) -> None:
        self._entries.append(Entry(self.next_id, request, stream))
        self.next_id += 1

    @property
    def has_clients(self) -> bool:
        """Whether anybody waits who has not gone away."""
        return any(not entry.stream.is_gone for entry in self._entries)

    def release(self, entry: Entry) -> None:
        """Of an entry that has left the batch."""
        if self._allocator is not None and entry.allocation is not None:
            self._allocator.free(entry.allocation)
            entry.allocation = None

    def next_batch(
        self, min_size: int | None, max_size: int | None, max_prefill_tokens: int, max_tokens: int
    ) -> NewBatch | None:
        """Takes what fits from the front. None where nothing does."""
        if max_prefill_tokens <= 0 or max_tokens <= 0 or not self._entries or max_size == 0:
            return None
        if min_size is not None and len(self._entries) < min_size:
            return None
        block_size = self._info.block_size
        budget = -(-max_prefill_tokens // block_size) * block_size
        if self._allocator is None:
            taken, num_tokens = self._take_padded(max_size, budget, max_tokens)
        else:
            taken, num_tokens = self._take_blocks(self._allocator, max_size, budget)
        if not taken or (min_size is not None and len(taken) < min_size):
            for entry, _ in reversed(taken):
                self.release(entry)
                self._entries.appendleft(entry)
            return None
        return self._to_batch(taken, num_tokens)

    def _take_padded(self, max_size: int | None, budget: int, max_tokens: int) -> tuple[list[tuple[Entry, int]], int]:
        """As many as fit padded to the longest prompt. Second: the tokens that the batch's message tells of."""
        taken: list[tuple[Entry, int]] = []
        longest = num_prefill_tokens = num_output_tokens = 0
        while self._entries and len(taken) != max_size:
            entry = self._entries.popleft()
            if entry.stream.is_gone:
                continue
            longest = max(longest, entry.num_prompt_tokens)
            num_prefill_tokens = (len(taken) + 1) * longest
            num_output_tokens += entry.max_new_tokens
            total = num_prefill_tokens + num_output_tokens + self._info.speculate
            if num_prefill_tokens > budget or total > max_tokens:
                self._entries.appendleft(entry)
                break
            taken.append((entry, 0))
        return taken, num_prefill_tokens + num_output_tokens

    def _take_blocks(
        self, allocator: Allocator, max_size: int | None, budget: int
    ) -> tuple[list[tuple[Entry, int]], int]:
        """As many as there are blocks and prompt tokens for, each with its chunk_len (0: none), and their tokens."""
        taken: list[tuple[Entry, int]] = []
        num_prefill_tokens = 0
        while self._entries and len(taken) != max_size:
            entry = self._entries.popleft()
            if entry.stream.is_gone:
                continue
            entry.allocation = self._allocate(allocator, entry)
            if entry.allocation is None:
                self._entries.appendleft(entry)
                break
            num_uncached = entry.num_prompt_tokens - entry.allocation.num_cached_tokens
            if num_prefill_tokens + num_uncached > budget:
                chunk_len = budget - num_prefill_tokens if self._info.support_chunking else 0
                if chunk_len > 0:
                    taken.append((entry, chunk_len))
                else:
                    self.release(entry)
                    self._entries.appendleft(entry)
                break
            num_prefill_tokens += num_uncached
            taken.append((entry, 0))
        return taken, num_prefill_tokens

    def _allocate(self, allocator: Allocator, entry: Entry) -> Allocation | None:
        num_tokens = entry.num_prompt_tokens + entry.max_new_tokens + self._info.speculate - 1
        has_logprobs = entry.request.message.prefill_logprobs
        allocation = allocator.allocate(num_tokens, None if has_logprobs else entry.request.prompt_ids)
        if allocation is not None and allocation.num_cached_tokens == entry.num_prompt_tokens:
            # One token at least is computed.
            allocation.num_cached_tokens -= 1
        return allocation

    def _to_batch(self, taken: list[tuple[Entry, int]], num_tokens: int) -> NewBatch:
        batch = pb.Batch(id=self._next_batch_id, size=len(taken), max_tokens=num_tokens)
        self._next_batch_id += 1
        for entry, chunk_len in taken:
            request = batch.requests.add()
            request.CopyFrom(entry.request.message)
            request.id = entry.id
            if chunk_len:
                request.chunk_len = chunk_len
            if entry.allocation is not None:
                request.blocks.extend(entry.allocation.blocks)
                request.slots.extend(entry.allocation.slots)
                request.cache_len = entry.allocation.num_cached_tokens
        batch.max_blocks = max(len(request.blocks) for request in batch.requests)
        return NewBatch(batch, {entry.id: entry for entry, _ in taken})
