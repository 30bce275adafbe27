"""Decode steps of a small model, launch by launch and by CUDA graph: what graphs save of a step.

The model has the demo model's shape (SmolLM2-135M) and random weights, on which no time depends: so nothing has to be
downloaded. A step is timed from the host: its batch is copied to the device, the model runs, the device is waited for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedkv.plugin.attention_metadata import AttentionContext, AttentionMetadata, AttentionOptions
from pagedkv.plugin.backend.graphs import PaddedDecodes
from pagedkv.plugin.backend.step_input import StepInput
from pagedkv.plugin.decoder import Decoder, DecoderLayer, DecoderShape, DecoderWeights, Projection, Rotary
from pagedkv.plugin.interface import AttentionKernels, ModelInput
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH
from pagedkv.plugin.model_spec import AttentionSpec

DEMO_SHAPE = DecoderShape(
    attention=AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, v_head_dim=64),
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49152,
    activation="silu",
    norm_eps=1e-5,
)
BATCH_SIZES = (1, 8, 32)
CONTEXT_LEN = 1024
BLOCK_SIZE = 16
_MAX_ERROR = 0.01
"""Of the graph's logits against those without, relative: the products may be summed in another order."""


@dataclass(frozen=True, slots=True)
class StepFigure:
    """Medians of one batch size."""

    batch_size: int
    context_len: int
    eager_ms: float
    graph_ms: float
    error: float
    """Of the graph's logits, relative to the other ones' norm."""

    @property
    def is_right(self) -> bool:
        return self.error <= _MAX_ERROR

    @property
    def saved_share(self) -> float:
        """Of the step without a graph."""
        return 1 - self.graph_ms / self.eager_ms


def make_weights(shape: DecoderShape, dtype: torch.dtype, device: torch.device, max_positions: int) -> DecoderWeights:
    """Random ones that keep magnitudes from layer to layer."""
    spec, hidden = shape.attention, shape.hidden_size
    ones = torch.ones(hidden, device=device)

    def project(out_features: int, in_features: int) -> Projection:
        return Projection(torch.randn(out_features, in_features, dtype=dtype, device=device) * in_features**-0.5)

    frequencies = 1e5 ** (-torch.arange(0, spec.head_dim, 2, device=device).float() / spec.head_dim)
    angles = torch.arange(max_positions, device=device).float()[:, None] * frequencies
    rotary = Rotary(angles.cos(), angles.sin())
    layers = (
        DecoderLayer(
            input_norm=ones,
            qkv=project((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, hidden),
            attention_output=project(hidden, spec.num_heads * spec.head_dim),
            feed_forward_norm=ones,
            gate_up=project(2 * shape.intermediate_size, hidden),
            down=project(hidden, shape.intermediate_size),
            rotary=rotary,
            options=AttentionOptions(scale=spec.head_dim**-0.5),
        )
        for _ in range(shape.num_layers)
    )
    embedding = torch.randn(shape.vocab_size, hidden, dtype=dtype, device=device)
    return DecoderWeights(shape, embedding, layers, ones, head=None)


def make_step(batch_size: int, context_len: int, vocab_size: int) -> StepInput:
    """One decode of each sequence, the last token of `context_len`; every sequence has blocks of its own."""
    rows = np.arange(batch_size, dtype=np.int64)
    num_blocks = -(-context_len // BLOCK_SIZE)
    block_table = (rows[:, None] * num_blocks + np.arange(num_blocks)).astype(np.int32)
    last = context_len - 1
    return StepInput(
        token_ids=rows * 7919 % vocab_size,
        positions=np.full(batch_size, last, np.int64),
        cu_seqlens_q=np.arange(batch_size + 1, dtype=np.int32),
        seq_lens=np.full(batch_size, context_len, np.int32),
        block_table=block_table,
        slot_mapping=block_table[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE,
        logit_rows=rows,
        num_sampling_rows=batch_size,
        next_token_ids=np.empty(0, np.int64),
        max_query_len=1,
        num_decodes=batch_size,
    )


def measure_steps(
    decoder: Decoder,
    kernels: AttentionKernels,
    shape: DecoderShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    context_len: int = CONTEXT_LEN,
    repeats: int = 50,
) -> Iterator[StepFigure]:
    """Each batch size without and with a graph; on a CPU, where there are none, the graph's buffers alone."""
    spec = shape.attention.cache_spec(BLOCK_SIZE, KV_DTYPE_OF_TORCH[dtype])
    num_blocks = max(batch_sizes) * -(-context_len // BLOCK_SIZE)
    storage = [kernels.allocate(spec, num_blocks) for _ in range(shape.num_layers)]
    for layer in storage:
        for name in ("k", "v"):
            layer.tensors[name].normal_()

    def forward(batch: ModelInput, metadata: AttentionMetadata) -> torch.Tensor:
        return decoder.forward(batch, AttentionContext(kernels, storage, metadata))

    decodes = PaddedDecodes(forward, batch_sizes, context_len, BLOCK_SIZE, device)
    if device.type == "cuda":
        decodes.capture()
    for batch_size in batch_sizes:
        step = make_step(batch_size, context_len, shape.vocab_size)

        def run_eagerly(step: StepInput = step) -> torch.Tensor:
            return forward(step.model_input(device), step.metadata(device))

        def replay(step: StepInput = step) -> torch.Tensor:
            return decodes.run(step)

        expected = run_eagerly().float()
        error = float((replay().float() - expected).norm() / expected.norm())
        yield StepFigure(
            batch_size,
            context_len,
            _median_ms(run_eagerly, device, repeats),
            _median_ms(replay, device, repeats),
            error,
        )


def _median_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """By the host's clock, until the device is done."""
    times = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:]) * 1e3
