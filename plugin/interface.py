"""The five interfaces of pagedkv. Each plugin is a class found by an entry point and made by a classmethod.

| group | interface | made by |
|---|---|---|
| `pagedkv.backends` | `Backend` | `create(config)` |
| `pagedkv.cache_managers` | `CacheManager` | `create(num_blocks, block_size, ...)` |
| `pagedkv.kernels` | `AttentionKernels` | `create(device)` |
| `pagedkv.schedulers` | `Scheduler` | `create(config, cache, max_total_tokens)` |
| `pagedkv.models` | `ModelAdapter` | `load(config, device)` |

A plugin class states `interface_version = 1`; the registry refuses another version and a class that lacks a method.
Nothing here is called from two threads at once: whoever owns a backend serializes its calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch

from pagedkv.plugin.attention_metadata import AttentionContext, AttentionMetadata, AttentionOptions
from pagedkv.plugin.kv_dtypes import KVCacheSpec, KVDtype
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec
from pagedkv.plugin.requests import CacheNamespace, Request, RequestId, StepOutput
from pagedkv.plugin.stats import BackendStats, CacheStats, SchedulerStats
from pagedkv.plugin.step_plan import BlockCopy, NewSequence, StepPlan

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagedkv.plugin.resolved_config import ModelSettings, ResolvedConfig, SchedulerSettings

INTERFACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a server tells its clients about a backend."""

    backend: str
    model: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: KVDtype
    attention_kernels: str
    """Name of the kernels in use, after `auto` has picked."""
    block_size: int
    requires_padding: bool
    """Whether rows of a batch are padded to equal length, so that a client should batch equal lengths together."""
    can_chunk_prefill: bool
    """Whether new and running requests share a step and a long prompt spreads over several."""
    has_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class WarmupLimits:
    """The largest work that will be asked for. 0 leaves a limit to the backend."""

    max_input_tokens: int = 0
    """Tokens of one prompt."""
    max_total_tokens: int = 0
    """Tokens of one prompt and its output."""
    max_prefill_tokens: int = 0
    """Prompt tokens of one step."""
    max_batch_size: int = 0
    """Sequences in one step."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a warmed-up backend holds."""

    max_cache_tokens: int
    """Tokens that the cache is said to hold: the physical ones × overcommit."""
    max_input_tokens: int
    max_total_tokens: int
    num_blocks: int
    """Physical blocks; for a contiguous cache, tokens."""


@runtime_checkable
class Backend(Protocol):
    """Turns requests into tokens, a step at a time. Knows tokens; not text, not gRPC."""

    interface_version: ClassVar[int]

    @classmethod
    def create(cls, config: ResolvedConfig) -> Self:
        """Loads the model. Raises UnsupportedError with every reason when the config can't be served."""

    @property
    def info(self) -> BackendInfo: ...

    def warmup(self, limits: WarmupLimits) -> Capacity:
        """Sizes and allocates the cache, after running the largest step once where memory is the device's own, so that
        no later step runs out of it.

        May be called again while nothing is live; the cache is then empty.

        Raises:
            CapacityError: the budget does not hold one request of the limits.
        """

    def add(self, requests: Sequence[Request]) -> None:
        """Takes requests, all or none; computes nothing.

        Raises:
            RequestError: a prompt is empty or has an id outside the vocabulary; the text names the request.
            CapacityError: prompt or output can never fit the model, the limits or the cache.
            DuplicateRequestError: the id is live, or twice in this call.
            UnavailableError: before `warmup` or after `close`.
        """

    def step(self, only: Collection[RequestId] | None = None) -> list[StepOutput]:
        """Runs one step: at most one new token for each live request, in the order they were added.

        A request may have no output (its prompt is not finished, it waits for room). After an output with a
        `finish_reason` the request is released.

        Args:
            only: run these live requests alone; None runs all.

        Raises:
            StepError: the step failed; the named requests are gone, all others and the backend live on.
        """

    def abort(self, ids: Collection[RequestId]) -> None:
        """Ends requests without an output and gives their blocks back. Ids that are not live are ignored."""

    def has_unfinished(self) -> bool:
        """Whether a request is live."""

    def stats(self) -> BackendStats: ...

    def check_integrity(self) -> None:
        """Recomputes the bookkeeping from the data. Raises IntegrityError where it differs."""

    def close(self) -> None:
        """Aborts everything and frees the memory. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The answer to "what would acquiring take?"; asking changed nothing."""

    num_cached_tokens: int
    """Tokens whose KV is already there: 0 for a sequence that holds blocks, a prefix hit for one that does not."""
    num_pending_tokens: int
    """As num_cached_tokens, counting also blocks that another sequence is about to fill."""
    num_missing_blocks: int
    """By how many blocks free and evictable ones fall short; 0 means that `acquire` succeeds."""


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """Blocks that a sequence now holds."""

    num_cached_tokens: int
    """As in BlockPlan; the caller computes from there on."""
    copies: tuple[BlockCopy, ...]
    """To run before the step that writes."""


@runtime_checkable
class CacheManager(Protocol):
    """Which block holds which token: ids, reference counts and names on the host, no tensor.

    A sequence is opened, acquires blocks as it grows, and is released, at its end or when preempted.
    """

    interface_version: ClassVar[int]

    @classmethod
    def create(
        cls, num_blocks: int, block_size: int, *, has_prefix_cache: bool = True, kv_dtype_name: str = "auto"
    ) -> Self:
        """All blocks free. `kv_dtype_name` becomes part of every block's name."""

    def open(
        self,
        seq_id: RequestId,
        token_ids: Sequence[int],
        namespace: CacheNamespace,
        *,
        may_reuse_prefix: bool = True,
        is_readmission: bool = False,
    ) -> None:
        """Makes a sequence known; it holds no block yet.

        Args:
            token_ids: the caller's own sequence of known tokens, to which it only ever appends; kept, not copied.
            may_reuse_prefix: False computes every token (blocks become findable all the same).
            is_readmission: keeps the lookup out of the prefix counters.
        """

    def plan(self, seq_id: RequestId, num_tokens: int) -> BlockPlan:
        """What `acquire` with the same arguments would need. Changes nothing.

        The last known token never counts as cached, so that something is left to compute.
        """

    def acquire(self, seq_id: RequestId, num_tokens: int) -> BlockGrant | None:
        """Gives a sequence writable slots for its tokens up to `num_tokens`; looks for its prefix if it holds no block.

        Blocks for which only cached ones are left are taken by evicting, least recently used first and a tail before
        its parent. A shared block that will be written is copied: its source stays as it is until the sequence commits
        or is released, so that no target of a copy is the source of another one before that. `num_tokens` may exceed
        the known tokens. None, and nothing changed, where there is no room.
        """

    def commit(self, seq_id: RequestId, num_computed_tokens: int) -> None:
        """The slots below `num_computed_tokens` have been written: full blocks among them become findable."""

    def fork(self, parent_id: RequestId, seq_id: RequestId, num_tokens: int) -> int:
        """Lets an opened sequence without blocks share the parent's blocks of their first tokens.

        Args:
            num_tokens: how many computed tokens to share at the most; must not exceed the parent's computed ones.

        Returns:
            The tokens shared: at most the common beginning of both, and one less than the child's known tokens.
        """

    def release(self, seq_id: RequestId) -> None:
        """Gives the blocks back, findable ones stay cached, and forgets the sequence.

        Raises:
            IntegrityError: the sequence is not open.
        """

    def block_table(self, seq_id: RequestId) -> Sequence[int]:
        """Block ids in order of the sequence's tokens; a live view, read only."""

    def stats(self) -> CacheStats: ...

    def check_integrity(self) -> None:
        """Recomputes from the data: free, cached and used are disjoint and sum to all; a reference count is the number
        of tables that hold the block; names and blocks are one to one; a named block is full. Raises IntegrityError."""


@runtime_checkable
class Scheduler(Protocol):
    """Which sequences run in the next step and how many tokens of each; whom to preempt when the cache is full.

    Its decisions are a function of the calls made so far alone: no clock, no hash order. Shards run it side by side.
    """

    interface_version: ClassVar[int]

    @classmethod
    def create(cls, config: SchedulerSettings, cache: CacheManager, num_cache_tokens: int) -> Self:
        """Owns the cache manager from now on. `num_cache_tokens` is what an empty cache holds."""

    def add(self, sequence: NewSequence) -> None:
        """Queues a sequence. Raises CapacityError, at once, for one that an empty cache could not hold to its end."""

    def schedule(self, only: Collection[RequestId] | None = None, max_chunk_tokens: int | None = None) -> StepPlan:
        """Decides the next step and takes the blocks for it. The plan is committed or failed before the next call.

        Args:
            only: run these alone.
            max_chunk_tokens: bounds the tokens beside those of sequences that have one left; at least 1.
        """

    def commit(self, plan: StepPlan, new_tokens: Mapping[RequestId, int], finished: Collection[RequestId]) -> None:
        """The plan ran: its tokens are computed, sampled ones are appended, finished sequences are released."""

    def fail(self, plan: StepPlan) -> None:
        """The plan did not run to its end: its sequences are released, none of its new blocks becomes findable."""

    def abort(self, ids: Collection[RequestId]) -> None:
        """Releases sequences, queued or running, between steps. Unknown ids are ignored."""

    def stats(self) -> SchedulerStats: ...


@dataclass(frozen=True, slots=True)
class KVStorage:
    """One layer's blocks in memory, laid out as the kernels that allocated it please."""

    spec: KVCacheSpec
    num_blocks: int
    tensors: Mapping[str, torch.Tensor]
    """All memory of the layer, scales too. The first dim of each is the block, so that blocks copy generically."""
    static_scales: tuple[torch.Tensor, torch.Tensor] | None = None
    """k_scale, v_scale: [num_kv_heads] float32 each, for KV dtypes with STATIC granularity."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@runtime_checkable
class AttentionKernels(Protocol):
    """How blocks lie in memory and what is done with them."""

    interface_version: ClassVar[int]
    name: str
    """Of the implementation, after any choosing."""
    can_capture_graphs: bool
    """Whether store and attend may be captured in a CUDA graph and replayed with other metadata of the same shape."""

    @classmethod
    def create(cls, device: torch.device) -> Self: ...

    def unsupported_reasons(self, spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype) -> list[str]:
        """Why a layer can't be served on this device with queries of `dtype`; empty when it can."""

    def allocate(self, cache_spec: KVCacheSpec, num_blocks: int) -> KVStorage:
        """Zeroed storage of num_blocks × cache_spec.bytes_per_block bytes. Raises torch.OutOfMemoryError."""

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Writes k: [num_tokens, num_kv_heads, head_dim] and v: [num_tokens, num_kv_heads, v_head_dim], any strides
        with a contiguous last dim, to `metadata.slot_mapping`, quantized as the KV dtype says. PADDING_SLOT is skipped.
        A sequence's slots are always written in order, so the slots below one in its block are written already."""

    def attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        """Causal attention of q: [num_tokens, num_heads, head_dim] over each row's stored tokens.

        Softmax and sums in float32. Slots past a row's seq_len are never read into a result, whatever they hold.

        Returns:
            [num_tokens, num_heads, v_head_dim] in the dtype of q; zero for padding rows.
        """

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        """Copies whole blocks, scales too. No target is a source in the same call."""

    def swap_blocks(self, source: KVStorage, target: KVStorage, copies: Sequence[BlockCopy]) -> None:
        """As copy_blocks, between two storages of the same spec, which may lie on two devices."""

    def read(self, storage: KVStorage, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantizes what is stored at slots: [N] int64, for tests and inspection.

        Returns:
            k: [N, num_kv_heads, head_dim] and v: [N, num_kv_heads, v_head_dim], float32, on the storage's device.
        """


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back."""

    all_special_ids: Collection[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Exact text: no clean-up of spaces. An incomplete UTF-8 character comes out as U+FFFD."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for messages of `role` and `content`. Raises RequestError where the model has no template."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A step's tokens, flattened over its sequences, on the model's device."""

    token_ids: torch.Tensor
    """[num_tokens] int64."""
    positions: torch.Tensor
    """[num_tokens] int64: place of each token in its own sequence."""
    logit_rows: torch.Tensor
    """[num_rows] int64: the tokens whose logits are wanted."""


@runtime_checkable
class ModelAdapter(Protocol):
    """Loads a checkpoint and runs a flattened batch of tokens through it."""

    interface_version: ClassVar[int]
    spec: ModelSpec
    """Of the loaded shard: heads are this shard's own."""

    @classmethod
    def describe(cls, settings: ModelSettings) -> ModelSpec:
        """The whole model's facts from its configuration, without weights.

        Raises:
            ConfigError: there is no such checkpoint.
            UnsupportedError: the architecture can't be served.
        """

    @classmethod
    def load_tokenizer(cls, settings: ModelSettings) -> Tokenizer: ...

    @classmethod
    def load(cls, config: ResolvedConfig, device: torch.device) -> Self:
        """Loads weights. Raises UnsupportedError for a model some layer of which would not call the context."""

    def forward(self, batch: ModelInput, attention: AttentionContext) -> torch.Tensor:
        """Runs the batch; every attention layer calls `attention.attend` once with its index.

        Returns:
            [num_rows, vocab_size] logits of `batch.logit_rows`, in the model's dtype or float32.
        """
