"""The five interfaces of pagedkv. A plugin is a class that an entry point names and a classmethod makes.

| group | interface | made by |
|---|---|---|
| `pagedkv.backends` | `Backend` | `create(config)` |
| `pagedkv.cache_managers` | `CacheManager` | `create(num_blocks, block_size, ...)` |
| `pagedkv.kernels` | `AttentionKernels` | `create(device)` |
| `pagedkv.schedulers` | `Scheduler` | `create(config, cache, num_cache_tokens)` |
| `pagedkv.models` | `ModelAdapter` | `load(config, device)` |

A plugin class states `interface_version = (2, 0)`, and may have two more attributes:

- `features`, a frozenset of the names of what it understands beyond version 1.0 (`pagedkv.plugin.features`);
- `settings_model`, a pydantic model of its table `[plugins.NAME]` in the config. It is then made with one more keyword
  argument, `settings`: an instance of that model (`pagedkv.plugin.plugin_settings`).

The registry refuses a version that it does not speak and a class that lacks a method.
No object is called from two threads at once: the owner of a backend serializes its calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch

from pagedkv.plugin.attention_metadata import AttentionContext, AttentionMetadata, AttentionOptions
from pagedkv.plugin.features import InterfaceVersion
from pagedkv.plugin.kv_dtypes import KVCacheSpec, KVDtype
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec
from pagedkv.plugin.requests import CacheNamespace, Request, RequestId, StepOutput
from pagedkv.plugin.stats import BackendStats, CacheStats, SchedulerStats
from pagedkv.plugin.step_plan import BlockCopy, NewSequence, StepPlan

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagedkv.plugin.resolved_config import ModelSettings, ResolvedConfig, SchedulerSettings


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a server reports to its clients about a backend."""

    backend: str
    model: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: KVDtype
    attention_kernels: str
    """Name of the kernels in use, after `auto` has picked them."""
    block_size: int
    requires_padding: bool
    """Whether rows of a batch are padded to equal length. If so, a client should batch requests of similar length."""
    can_chunk_prefill: bool
    """Whether new and running requests can share a step, and a long prompt can be computed in several steps."""
    has_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class WarmupLimits:
    """The largest requests and batches that will be sent. 0 lets the backend choose a limit."""

    max_input_tokens: int = 0
    """Tokens of one prompt."""
    max_total_tokens: int = 0
    """Tokens of one prompt and its output."""
    max_prefill_tokens: int = 0
    """Prompt tokens of one step."""
    max_batch_size: int = 0
    """Sequences in one step."""
    may_chunk_prefill: bool = True
    """Whether a prompt may spread over several steps; if not, max_prefill_tokens bounds a max_input_tokens of 0 too."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many tokens a warmed-up backend can hold."""

    max_cache_tokens: int
    """Tokens that are reported as the cache's size: physical slots × overcommit."""
    max_input_tokens: int
    """Longest prompt that is taken: as asked for, else at least 1 and below max_total_tokens."""
    max_total_tokens: int
    """Longest prompt and output that are taken, as asked for; a request of so many runs to its end."""
    num_blocks: int
    """Physical blocks; for a contiguous cache, tokens."""


@runtime_checkable
class Backend(Protocol):
    """Generates the tokens of requests, one step at a time. It knows tokens, not text and not gRPC."""

    interface_version: ClassVar[InterfaceVersion]

    @classmethod
    def create(cls, config: ResolvedConfig) -> Self:
        """Loads the model. Raises UnsupportedError, with every reason, if the config can't be served."""

    @property
    def info(self) -> BackendInfo: ...

    def warmup(self, limits: WarmupLimits) -> Capacity:
        """Sizes and allocates the cache.

        On a device with its own memory it first runs the largest step, so that no later step runs out of memory. May be
        called again while no request is live; the cache is empty after that. Lengths that are asked for are reported
        unchanged or refused; `pagedkv.plugin.limits` resolves the others. After an error the backend serves what it
        served before, with an empty cache at the most.

        Raises:
            CapacityError: one request of the limits does not fit into the budget.
        """

    def add(self, requests: Sequence[Request]) -> None:
        """Adds requests, all or none. Computes nothing.

        Raises:
            RequestError: a prompt is empty or has an id outside the vocabulary; the message names the request.
            CapacityError: prompt or output can never fit the model, the limits or the cache.
            DuplicateRequestError: the id is in use, or occurs twice in this call.
            UnavailableError: before `warmup` or after `close`.
        """

    def step(self, only: Collection[RequestId] | None = None) -> list[StepOutput]:
        """Runs one step: at most one new token for each live request, in the order they were added.

        A request may have no output (its prompt is not finished, or it waits for blocks). After an output with a
        `finish_reason` the request is released.

        Args:
            only: run only these live requests; None runs all.

        Raises:
            StepError: the step failed; the named requests have ended, all others and the backend continue.
        """

    def abort(self, ids: Collection[RequestId]) -> None:
        """Ends requests without an output and frees their blocks. Ignores ids that are not live."""

    def has_unfinished(self) -> bool:
        """Whether any request is live."""

    def stats(self) -> BackendStats: ...

    def check_integrity(self) -> None:
        """Recomputes the bookkeeping from the data. Raises IntegrityError if it differs."""

    def close(self) -> None:
        """Aborts all requests and frees the memory. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What `acquire` would find and need."""

    num_cached_tokens: int
    """Tokens whose KV is already in the cache by a prefix hit; 0 for a sequence that holds blocks."""
    num_pending_tokens: int
    """Like `num_cached_tokens`, but also counts blocks that another sequence is about to fill."""
    num_missing_blocks: int
    """How many more blocks are needed than are free or evictable; 0 means that `acquire` succeeds."""


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """The result of `acquire`."""

    num_cached_tokens: int
    """As in BlockPlan. The caller computes the tokens after these."""
    copies: tuple[BlockCopy, ...]
    """Copies to run before the step writes."""


@runtime_checkable
class CacheManager(Protocol):
    """Decides which block holds which token: ids, reference counts and names on the host, no tensors.

    A sequence is opened, acquires blocks as it grows, and is released at its end or when it is preempted.
    """

    interface_version: ClassVar[InterfaceVersion]

    @classmethod
    def create(
        cls, num_blocks: int, block_size: int, *, has_prefix_cache: bool = True, kv_dtype_name: str = "auto"
    ) -> Self:
        """Makes a manager whose blocks are all free. `kv_dtype_name` becomes part of every block's name."""

    def open(
        self,
        seq_id: RequestId,
        token_ids: Sequence[int],
        namespace: CacheNamespace,
        *,
        may_reuse_prefix: bool = True,
        is_readmission: bool = False,
    ) -> None:
        """Registers a sequence. It holds no block yet.

        Args:
            token_ids: the caller's list of known tokens, to which it only appends. It is kept, not copied.
            may_reuse_prefix: False computes every token (its blocks still become findable).
            is_readmission: leaves the lookup out of the prefix counters.
        """

    def plan(self, seq_id: RequestId, num_tokens: int) -> BlockPlan:
        """Returns what `acquire` with the same arguments would need. Changes nothing.

        The last known token never counts as cached, so that at least one token is left to compute.
        """

    def acquire(self, seq_id: RequestId, num_tokens: int) -> BlockGrant | None:
        """Gives a sequence writable slots for its tokens up to `num_tokens`; looks for its prefix if it holds no block.

        If no block is free, cached blocks are evicted, least recently used first and a tail before its parent. A shared
        block that will be written is copied. The source of a copy does not change until the sequence commits or is
        released, so that until then no target of a copy is the source of another one. `num_tokens` may exceed the
        known tokens. May be called again with more tokens before `commit`. Returns None, and changes nothing, if there
        are not enough blocks.
        """

    def commit(self, seq_id: RequestId, num_computed_tokens: int) -> None:
        """Tells the manager that the slots below `num_computed_tokens` are written. Full blocks become findable."""

    def fork(self, parent_id: RequestId, seq_id: RequestId, num_tokens: int) -> int:
        """Lets an opened sequence without blocks share the parent's blocks of their common first tokens.

        Args:
            num_tokens: most tokens to share; not more than the parent has computed.

        Returns:
            Number of shared tokens: at most the common beginning of both, and one less than the child's known tokens.
        """

    def release(self, seq_id: RequestId) -> None:
        """Releases the blocks of a sequence and removes it. Findable blocks stay cached.

        Raises:
            IntegrityError: the sequence is not open.
        """

    def block_table(self, seq_id: RequestId) -> Sequence[int]:
        """Returns block ids in order of the sequence's tokens, as a live read-only view."""

    def stats(self) -> CacheStats: ...

    def check_integrity(self) -> None:
        """Recomputes the bookkeeping from the data.

        Free, cached and used blocks are disjoint and sum to all; a reference count is the number of tables that hold
        the block; names and blocks are one to one; a named block is full.

        Raises:
            IntegrityError: one of these does not hold.
        """


@runtime_checkable
class Scheduler(Protocol):
    """Decides which sequences run in the next step, how many tokens of each, and which to preempt if the cache is full.

    Its decisions depend only on the calls made so far, not on a clock or on hash order: shards run it in parallel and
    must agree.
    """

    interface_version: ClassVar[InterfaceVersion]

    @classmethod
    def create(cls, config: SchedulerSettings, cache: CacheManager, num_cache_tokens: int) -> Self:
        """Makes a scheduler that owns the cache manager. `num_cache_tokens` is the size of the empty cache."""

    def add(self, sequence: NewSequence) -> None:
        """Queues a sequence and keeps its `token_ids`, the caller's own growing list, by reference.

        Raises:
            CapacityError: even an empty cache could not hold the sequence to its end.
        """

    def schedule(self, only: Collection[RequestId] | None = None, max_chunk_tokens: int | None = None) -> StepPlan:
        """Decides the next step and takes the blocks for it. The plan is committed or failed before the next call.

        Args:
            only: run only these sequences; None runs all.
            max_chunk_tokens: limits the tokens of all sequences with more than one token left; at least 1.
        """

    def commit(self, plan: StepPlan, finished: Collection[RequestId]) -> None:
        """Records that a plan ran: counts its tokens as computed and releases finished sequences.

        The caller has appended the sampled token of each row that is a last chunk to that sequence's `token_ids`.
        """

    def fail(self, plan: StepPlan) -> None:
        """Records that a plan failed: releases its sequences; none of its new blocks becomes findable."""

    def abort(self, ids: Collection[RequestId]) -> None:
        """Releases sequences, queued or running, between steps. Ignores unknown ids."""

    def stats(self) -> SchedulerStats: ...


@dataclass(frozen=True, slots=True)
class KVStorage:
    """One layer's blocks in memory. The kernels that allocated it decide the layout."""

    spec: KVCacheSpec
    num_blocks: int
    tensors: Mapping[str, torch.Tensor]
    """All memory of the layer, scales too. The first dim of each is the block, so that any code can copy blocks."""
    static_scales: tuple[torch.Tensor, torch.Tensor] | None = None
    """k_scale, v_scale: [num_kv_heads] float32 each, for KV dtypes with STATIC granularity."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@runtime_checkable
class AttentionKernels(Protocol):
    """Stores keys and values in blocks of memory, and attends over them."""

    interface_version: ClassVar[InterfaceVersion]
    name: str
    """Name of the implementation; for `auto` that of the kernels it picked."""
    can_capture_graphs: bool
    """Whether store and attend may be captured in a CUDA graph and replayed with other metadata of the same shape."""

    @classmethod
    def create(cls, device: torch.device) -> Self: ...

    def unsupported_reasons(self, spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype) -> list[str]:
        """Returns the reasons why a layer can't run on this device with queries of `dtype`; empty if it can."""

    def allocate(self, cache_spec: KVCacheSpec, num_blocks: int) -> KVStorage:
        """Allocates zeroed storage of num_blocks × cache_spec.bytes_per_block bytes. Raises torch.OutOfMemoryError."""

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Writes keys and values to `metadata.slot_mapping`, quantized as the KV dtype says. Skips PADDING_SLOT.

        A sequence's slots are always written in order, so the slots before one in its block are already written.

        Args:
            k: [num_tokens, num_kv_heads, head_dim], any strides with a contiguous last dim.
            v: [num_tokens, num_kv_heads, v_head_dim], likewise.
        """

    def attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        """Computes causal attention of q: [num_tokens, num_heads, head_dim] over each row's stored tokens.

        Softmax and sums are in float32. The content of slots past a row's seq_len never affects a result.

        Returns:
            [num_tokens, num_heads, v_head_dim] in the dtype of q; zero for padding rows.
        """

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        """Copies whole blocks, scales too. No target is a source in the same call."""

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
        """Returns the exact text, without clean-up of spaces. An incomplete UTF-8 character becomes U+FFFD."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the prompt for messages of `role` and `content`. Raises RequestError if the model has no template."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A step's tokens, flattened over its sequences, on the model's device."""

    token_ids: torch.Tensor
    """[num_tokens] int64."""
    positions: torch.Tensor
    """[num_tokens] int64: position of each token in its own sequence."""
    logit_rows: torch.Tensor
    """[num_rows] int64: the tokens whose logits are wanted."""


@runtime_checkable
class ModelAdapter(Protocol):
    """Loads a checkpoint and runs a flattened batch of tokens through it."""

    interface_version: ClassVar[InterfaceVersion]
    spec: ModelSpec
    """Facts about the loaded shard: heads are those of this shard."""

    @classmethod
    def describe(cls, settings: ModelSettings) -> ModelSpec:
        """Reads the facts about the whole model from its configuration, without weights.

        Raises:
            ConfigError: the checkpoint does not exist.
            UnsupportedError: the architecture can't be served.
        """

    @classmethod
    def load_tokenizer(cls, settings: ModelSettings) -> Tokenizer: ...

    @classmethod
    def load(cls, config: ResolvedConfig, device: torch.device) -> Self:
        """Loads weights. Raises UnsupportedError for a model with an attention layer that does not call the context."""

    def forward(self, batch: ModelInput, attention: AttentionContext) -> torch.Tensor:
        """Runs the batch; every attention layer calls `attention.attend` once with its index.

        Returns:
            [num_rows, vocab_size] logits of `batch.logit_rows`, in the model's dtype or float32.
        """
