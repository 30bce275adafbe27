"""The paged cache manager: block tables that share blocks, by fork or by equal prefix.

Paging of the KV cache and copy-on-write of its blocks follow Kwon et al. 2023, "Efficient Memory Management for Large
Language Model Serving with PagedAttention".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pagedkv.plugin.cache.block_names import BlockNames, hash_root
from pagedkv.plugin.cache.block_pool import BlockPool
from pagedkv.plugin.cache.integrity import check_integrity, count_used_slots
from pagedkv.plugin.cache.prefix_index import PrefixIndex
from pagedkv.plugin.cache.sequence_blocks import SequenceBlocks, count_unfilled_slots
from pagedkv.plugin.errors import IntegrityError, RequestError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import BlockGrant, BlockPlan
from pagedkv.plugin.kv_events import KVEventListener, StoredBlock
from pagedkv.plugin.requests import CacheNamespace, RequestId
from pagedkv.plugin.stats import CacheStats
from pagedkv.plugin.step_plan import BlockCopy, BlockId, count_common_tokens

if TYPE_CHECKING:
    from typing_extensions import Self

_NEVER = 2**63
_NOTHING_NEW = BlockGrant(num_cached_tokens=0, copies=())


class PagedCacheManager:
    """A `CacheManager` with reference-counted blocks, a prefix index and copy-on-write.

    A sequence holds the blocks of its table and, from a granted copy until the commit after it, the copy's source: no
    other grant of the same step can take that block before the copy has run.
    """

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION

    def __init__(self, num_blocks: int, block_size: int, *, has_prefix_cache: bool, kv_dtype_name: str) -> None:
        self._block_size = block_size
        self._has_prefix_cache = has_prefix_cache
        self._kv_dtype_name = kv_dtype_name
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex()
        self._sequences: dict[RequestId, SequenceBlocks] = {}
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._num_evictions = 0
        self._num_copies = 0
        self._listener: KVEventListener | None = None

    @classmethod
    def create(
        cls, num_blocks: int, block_size: int, *, has_prefix_cache: bool = True, kv_dtype_name: str = "auto"
    ) -> Self:
        return cls(num_blocks, block_size, has_prefix_cache=has_prefix_cache, kv_dtype_name=kv_dtype_name)

    def open(
        self,
        seq_id: RequestId,
        token_ids: Sequence[int],
        namespace: CacheNamespace,
        *,
        may_reuse_prefix: bool = True,
        is_readmission: bool = False,
    ) -> None:
        """See `CacheManager.open`. Raises IntegrityError if the sequence is already open."""
        if seq_id in self._sequences:
            raise IntegrityError(f"sequence {seq_id} is opened, but it is open already")
        root = hash_root(namespace, self._kv_dtype_name, self._block_size) if self._has_prefix_cache else b""
        self._sequences[seq_id] = SequenceBlocks(
            token_ids,
            namespace,
            BlockNames(token_ids, root, self._block_size),
            may_reuse_prefix=may_reuse_prefix,
            is_counted=not is_readmission,
            publish_at_tokens=self._block_size if self._has_prefix_cache else _NEVER,
        )

    def plan(self, seq_id: RequestId, num_tokens: int) -> BlockPlan:
        sequence = self._find(seq_id)
        if num_tokens <= sequence.num_writable_tokens:
            return BlockPlan(num_cached_tokens=0, num_pending_tokens=0, num_missing_blocks=0)
        max_blocks = self._max_reusable_blocks(sequence)
        hits = self._index.find_prefix(sequence.names, max_blocks)
        num_pending_blocks = self._index.count_pending_prefix(sequence.names, len(hits), max_blocks)
        return BlockPlan(
            num_cached_tokens=len(hits) * self._block_size,
            num_pending_tokens=num_pending_blocks * self._block_size,
            num_missing_blocks=self._count_missing_blocks(sequence, num_tokens, hits),
        )

    def acquire(self, seq_id: RequestId, num_tokens: int) -> BlockGrant | None:
        sequence = self._find(seq_id)
        if num_tokens <= sequence.num_writable_tokens:
            return _NOTHING_NEW
        hits = self._index.find_prefix(sequence.names, self._max_reusable_blocks(sequence))
        if self._count_missing_blocks(sequence, num_tokens, hits):
            return None
        self._take_hits(sequence, hits)
        copies = (self._copy_on_write(sequence),) if self._needs_copy(sequence, num_tokens) else ()
        self._grow(sequence, num_tokens)
        self._expect_blocks(sequence)
        return BlockGrant(num_cached_tokens=len(hits) * self._block_size, copies=copies)

    def commit(self, seq_id: RequestId, num_computed_tokens: int) -> None:
        """See `CacheManager.commit`.

        Raises:
            IntegrityError: fewer tokens than before, more than the sequence has, or more than it has slots for.
        """
        sequence = self._find(seq_id)
        if num_computed_tokens < sequence.num_computed_tokens:
            raise IntegrityError(
                f"sequence {seq_id} has computed {sequence.num_computed_tokens} tokens, not {num_computed_tokens}"
            )
        if num_computed_tokens > len(sequence.block_table) * self._block_size:
            raise IntegrityError(
                f"sequence {seq_id} has computed {num_computed_tokens} tokens, but has no slots for all"
            )
        if num_computed_tokens > len(sequence.token_ids):
            raise IntegrityError(
                f"sequence {seq_id} has computed {num_computed_tokens} tokens of {len(sequence.token_ids)}"
            )
        sequence.num_computed_tokens = num_computed_tokens
        if num_computed_tokens >= sequence.publish_at_tokens:
            self._publish_blocks(sequence)
        if sequence.copy_source is not None:
            self._release_copy_source(sequence)

    def fork(self, parent_id: RequestId, seq_id: RequestId, num_tokens: int) -> int:
        """See `CacheManager.fork`. A sequence that may not reuse a prefix shares nothing.

        Raises:
            IntegrityError: the child holds blocks, or the parent has not computed `num_tokens`.
            RequestError: the two are of different namespaces.
        """
        parent, child = self._find(parent_id), self._find(seq_id)
        if child.block_table:
            raise IntegrityError(f"sequence {seq_id} holds blocks; only a sequence without can become a fork")
        if not 0 <= num_tokens <= parent.num_computed_tokens:
            raise IntegrityError(
                f"{num_tokens} tokens of sequence {parent_id} are to be shared, "
                f"but it has computed {parent.num_computed_tokens}"
            )
        if parent.namespace != child.namespace:
            raise RequestError(f"request {seq_id} can't fork from request {parent_id} of another salt or adapter")
        if not child.may_reuse_prefix:
            return 0
        max_shared_tokens = max(0, min(num_tokens, len(child.token_ids) - 1))
        num_shared_tokens = count_common_tokens(parent.token_ids, child.token_ids, max_shared_tokens)
        self._share_blocks(parent, child, num_shared_tokens)
        return num_shared_tokens

    def release(self, seq_id: RequestId) -> None:
        sequence = self._find(seq_id)
        del self._sequences[seq_id]
        if sequence.copy_source is not None:
            self._release_copy_source(sequence)
        self._stop_expecting_blocks(sequence, sequence.num_expected_blocks)
        # Release the tail first: it then is the least recently used, and is evicted before its parents.
        for index in range(len(sequence.block_table) - 1, -1, -1):
            block = sequence.block_table[index]
            if index < sequence.num_published_blocks and not self._index.is_named(block):
                self._publish_or_touch(sequence, index)
            self._pool.release(block, keep_content=self._index.is_named(block))

    def block_table(self, seq_id: RequestId) -> Sequence[int]:
        """See `CacheManager.block_table`.

        Returns:
            An `array("i")`. `numpy.array(table)` copies it through the buffer protocol. Keep no buffer of it while the
            sequence may grow: Python can't grow an array that has exported buffers.
        """
        return self._find(seq_id).block_table

    def set_kv_event_listener(self, listener: KVEventListener | None) -> bool:
        """See `ReportsKVEvents`. Blocks that are findable already are not told again."""
        self._listener = listener
        return True

    def flush_prefix_cache(self) -> int:
        """See `FlushesPrefixCache`. These are no evictions: nothing needed their room."""
        num_blocks = self._pool.num_cached
        for _ in range(num_blocks):
            self._forget(self._pool.evict())
        return num_blocks

    def stats(self) -> CacheStats:
        """See `CacheManager.stats`. Its time grows with the number of open sequences, not of blocks."""
        num_used_blocks = self._pool.num_used
        num_unfilled_slots = count_unfilled_slots(self._sequences.values(), self._pool.ref_counts, self._block_size)
        return CacheStats(
            num_total_blocks=self._pool.num_blocks,
            num_used_blocks=num_used_blocks,
            num_cached_blocks=self._pool.num_cached,
            num_free_blocks=self._pool.num_free,
            num_used_slots=num_used_blocks * self._block_size - num_unfilled_slots,
            prefix_cache_query_tokens=self._num_queried_tokens,
            prefix_cache_hit_tokens=self._num_hit_tokens,
            evictions=self._num_evictions,
            copies=self._num_copies,
        )

    def check_integrity(self) -> None:
        check_integrity(self._sequences.values(), self._pool, self._index, self._block_size)
        if self.stats().num_used_slots != count_used_slots(self._sequences.values(), self._block_size):
            raise IntegrityError("num_used_slots differs from a count over all block tables")

    def _find(self, seq_id: RequestId) -> SequenceBlocks:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise IntegrityError(f"sequence {seq_id} is not open") from None

    def _count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _max_reusable_blocks(self, sequence: SequenceBlocks) -> int:
        if sequence.block_table or not sequence.may_reuse_prefix or not self._has_prefix_cache:
            return 0
        return max(0, len(sequence.token_ids) - 1) // self._block_size

    def _count_missing_blocks(self, sequence: SequenceBlocks, num_tokens: int, hits: list[int]) -> int:
        num_held = len(sequence.block_table) or len(hits)
        num_needed = max(0, self._count_blocks(num_tokens) - num_held) + self._needs_copy(sequence, num_tokens)
        num_available = self._pool.num_free + self._pool.num_cached - sum(map(self._pool.is_cached, hits))
        return max(0, num_needed - num_available)

    def _needs_copy(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Whether the next token goes into a block that others hold or can find.

        Only the block in which the computed tokens end can be shared: a fork shares nothing after it, and a prefix hit
        ends at the end of a block.
        """
        index, offset = divmod(sequence.num_computed_tokens, self._block_size)
        if offset == 0 or num_tokens <= sequence.num_computed_tokens:
            return False
        block = sequence.block_table[index]
        return self._pool.ref_counts[block] > 1 or self._index.is_named(block)

    def _take_hits(self, sequence: SequenceBlocks, hits: list[int]) -> None:
        """Adds references to the hits before any block is evicted, so that no hit is evicted."""
        if sequence.is_counted and not sequence.block_table and sequence.may_reuse_prefix and self._has_prefix_cache:
            self._num_queried_tokens += len(sequence.token_ids)
            self._num_hit_tokens += len(hits) * self._block_size
            sequence.is_counted = False
        if hits:
            for block in hits:
                self._pool.share(block)
            sequence.block_table.extend(hits)
            sequence.num_computed_tokens = len(hits) * self._block_size
            self._mark_published(sequence, len(hits))

    def _copy_on_write(self, sequence: SequenceBlocks) -> BlockCopy:
        index = sequence.num_computed_tokens // self._block_size
        source = sequence.block_table[index]
        (target,) = self._allocate(1)
        # The table's reference to the source becomes the copy's, until the next commit.
        sequence.block_table[index] = target
        sequence.copy_source = source
        self._num_copies += 1
        return BlockCopy(BlockId(source), BlockId(target))

    def _grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        num_new_blocks = self._count_blocks(num_tokens) - len(sequence.block_table)
        if num_new_blocks > 0:
            sequence.block_table.extend(self._allocate(num_new_blocks))
        # If no token will be written, the block in which the computed ones end may still be shared.
        if num_tokens > sequence.num_computed_tokens:
            sequence.num_writable_tokens = len(sequence.block_table) * self._block_size

    def _allocate(self, num_blocks: int) -> list[int]:
        for _ in range(num_blocks - self._pool.num_free):
            self._forget(self._pool.evict())
            self._num_evictions += 1
        return self._pool.allocate(num_blocks)

    def _share_blocks(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> None:
        shared = parent.block_table[: self._count_blocks(num_tokens)]
        copied_index = parent.num_computed_tokens // self._block_size
        if parent.copy_source is not None and copied_index < len(shared):
            # The parent's block gets its content only when the step runs; the child's copy may run in the same step.
            shared[copied_index] = parent.copy_source
        for block in shared:
            self._pool.share(block)
        child.block_table.extend(shared)
        child.num_computed_tokens = num_tokens
        self._mark_published(child, num_tokens // self._block_size)
        parent.num_writable_tokens = 0

    def _expect_blocks(self, sequence: SequenceBlocks) -> None:
        """Tells the index which blocks the sequence will fill with the tokens known by now."""
        start = max(sequence.num_published_blocks, sequence.num_expected_blocks)
        end = len(sequence.token_ids) // self._block_size
        if self._has_prefix_cache and start < end:
            sequence.names.extend(end)
            self._index.expect(sequence.names.names[start:end])
            sequence.num_expected_blocks = end

    def _stop_expecting_blocks(self, sequence: SequenceBlocks, end: int) -> None:
        start, end = sequence.num_published_blocks, min(end, sequence.num_expected_blocks)
        if start < end:
            self._index.stop_expecting(sequence.names.names[start:end])

    def _publish_blocks(self, sequence: SequenceBlocks) -> None:
        """Adds the blocks that are full by now to the index. A block whose name is taken is not added."""
        num_full_blocks = sequence.num_computed_tokens // self._block_size
        names = sequence.names
        names.extend(num_full_blocks)
        for index in range(sequence.num_published_blocks, num_full_blocks):
            self._publish(sequence, index)
        self._stop_expecting_blocks(sequence, num_full_blocks)
        self._mark_published(sequence, num_full_blocks)

    def _publish(self, sequence: SequenceBlocks, index: int) -> None:
        names = sequence.names
        is_new = self._index.publish(sequence.block_table[index], names.names[index])
        if is_new and self._listener is not None:
            start = index * self._block_size
            token_ids = sequence.token_ids[start : start + self._block_size]
            parent_name = names.names[index - 1] if index else None
            self._listener.on_stored(StoredBlock(names.names[index], parent_name, token_ids, sequence.namespace))

    def _forget(self, block: int) -> None:
        name = self._index.forget(block)
        if self._listener is not None:
            self._listener.on_removed(name)

    def _mark_published(self, sequence: SequenceBlocks, num_blocks: int) -> None:
        if self._has_prefix_cache:
            sequence.num_published_blocks = num_blocks
            sequence.publish_at_tokens = (num_blocks + 1) * self._block_size

    def _publish_or_touch(self, sequence: SequenceBlocks, index: int) -> None:
        """Keeps the content of a full block without a name findable after the sequence's end.

        Another block had the name when this one was filled. That block is marked as recently used; if it has been
        evicted, this block gets the name. So the content stays at least as long as that of the sequence's tail.
        """
        names = sequence.names
        names.extend(index + 1)
        named_block = self._index.find(names.names[index])
        if named_block is None:
            self._publish(sequence, index)
        else:
            self._pool.touch(named_block)

    def _release_copy_source(self, sequence: SequenceBlocks) -> None:
        source = sequence.copy_source
        assert source is not None, "callers ask first, to spare the call"
        sequence.copy_source = None
        self._pool.release(source, keep_content=self._index.is_named(source))
