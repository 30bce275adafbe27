"""What is admitted together: blocks, slots, cached prefixes, and the prompt tokens of a step."""

from __future__ import annotations

from typing import Any

from .rules import Tally
from .start_rules import Told


class Admission:
    """The blocks of the live requests of one recording."""

    def __init__(self, told: Told, max_batch_prefill_tokens: int, tally: Tally) -> None:
        self._told = told
        self._max_batch_prefill_tokens = max_batch_prefill_tokens
        self._tally = tally
        self._has_blocks = not told.info.requires_padding and not told.info.HasField("window_size")
        self._held: dict[int, Any] = {}
        """Live requests by id."""
        self._own: dict[int, set[int]] = {}
        """Their blocks beyond the cached prefix."""

    def admit(self, batch: Any, running: Any, at_ms: float) -> None:
        """Checks a new batch; its requests hold their blocks from here on."""
        self._at_ms = at_ms
        self._check("batch-size", batch.size == len(batch.requests) >= 1)
        self._check("batch-max-blocks", batch.max_blocks == max(len(request.blocks) for request in batch.requests))
        if not self._has_blocks:
            self._check("block-zero", all(not r.blocks for r in batch.requests) or not self._told.info.requires_padding)
            return
        for request in batch.requests:
            self._check_request(request)
            self._held[request.id] = request
        num_held = len({block for request in self._held.values() for block in request.blocks})
        self._check("blocks-in-all", num_held <= self._num_blocks - 1, num_held)
        self._check_budget(batch, running)

    def release(self, request_ids: set[int]) -> None:
        """Of requests that live no more; their prompts' blocks may be found again."""
        for request_id in request_ids:
            self._held.pop(request_id, None)
            self._own.pop(request_id, None)

    @property
    def _num_blocks(self) -> int:
        return self._told.max_batch_total_tokens // self._told.info.block_size

    def _check(self, rule: str, is_kept: bool, text: object = "") -> None:
        self._tally.check(rule, is_kept, self._at_ms, "Prefill", text)

    def _num_prompt_tokens(self, request: Any) -> int:
        max_new_tokens = request.stopping_parameters.max_new_tokens
        return len(request.slots) - max_new_tokens - self._told.info.speculate + 1

    def _num_uncached(self, request: Any) -> int:
        return self._num_prompt_tokens(request) - request.cache_len

    def _check_request(self, request: Any) -> None:
        block_size = self._told.info.block_size
        num_prompt_tokens = self._num_prompt_tokens(request)
        limit = min(request.truncate, self._told.max_input_tokens)
        self._check("request-tokens", 1 <= num_prompt_tokens <= limit, num_prompt_tokens)
        total = num_prompt_tokens + request.stopping_parameters.max_new_tokens
        self._check("max-new-tokens", total <= self._told.max_total_tokens, total)
        slots = [block * block_size + offset for block in request.blocks for offset in range(block_size)]
        is_whole = len(request.blocks) == -(-len(request.slots) // block_size)
        self._check("slots-from-blocks", is_whole and list(request.slots) == slots[: len(request.slots)])
        is_in_pool = all(1 <= block < self._num_blocks for block in request.blocks)
        self._check("block-zero", is_in_pool and len(set(request.blocks)) == len(request.blocks), request.blocks)
        num_prefix_blocks = self._check_prefix(request, num_prompt_tokens)
        own = set(request.blocks[num_prefix_blocks:])
        for other in self._held.values():
            self._check("blocks-disjoint", not own & set(other.blocks), f"{request.id} and {other.id}")
        self._own[request.id] = own

    def _check_prefix(self, request: Any, num_prompt_tokens: int) -> int:
        """Returns how many blocks of the request are a cached prefix."""
        block_size = self._told.info.block_size
        if request.prefill_logprobs:
            self._check("no-prefix-with-logprobs", request.cache_len == 0)
        if request.cache_len == 0:
            return 0
        is_all = request.cache_len == num_prompt_tokens - 1 and num_prompt_tokens % block_size == 0
        num_blocks = (request.cache_len + is_all) // block_size
        is_whole = num_blocks * block_size == request.cache_len + is_all <= num_prompt_tokens
        self._check("prefix-length", is_whole and self._told.info.use_prefix_caching, request.cache_len)
        # Whether an ended request had them can't be asked: the router also keeps the prompt of a request that it gave
        # blocks, found too long for the step, and queued again.
        for other_id, own in self._own.items():
            self._check("prefix-not-live", not own & set(request.blocks[:num_blocks]), f"of {other_id}")
        return num_blocks

    def _check_budget(self, batch: Any, running: Any) -> None:
        info = self._told.info
        budget = self._max_batch_prefill_tokens
        if running is not None:
            if info.support_chunking:
                budget -= running.current_tokens
            is_room = budget > 0 and running.max_tokens < self._told.max_batch_total_tokens
            self._check("prefill-budget", is_room, "no room beside the running batch")
        budget = -(-budget // info.block_size) * info.block_size
        whole = [request for request in batch.requests if not request.HasField("chunk_len")]
        num_tokens = sum(map(self._num_uncached, whole))
        self._check("batch-max-tokens", batch.max_tokens == num_tokens, (batch.max_tokens, num_tokens))
        self._check("prefill-budget", num_tokens <= budget, (num_tokens, budget))
        for request in batch.requests:
            if request.HasField("chunk_len"):
                is_last = request.id == batch.requests[-1].id and info.support_chunking
                is_rest = request.chunk_len == budget - num_tokens < self._num_uncached(request)
                self._check("chunk-fills-budget", is_last and is_rest, (request.chunk_len, budget, num_tokens))
