"""Finds static scales: runs text through a model and records the size of keys and values by layer and head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from pagedkv.integration.measure.evaluation.paged_run import PagedRun
from pagedkv.integration.measure.evaluation.texts import cut_sequences, load_texts
from pagedkv.plugin.assemble import use_threads
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.config import Config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import AttentionKernels, KVStorage
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH, KVCacheSpec, find_kv_dtype, find_static_variant
from pagedkv.plugin.kv_scales import key_scale_name, value_scale_name
from pagedkv.plugin.model_spec import AttentionSpec
from pagedkv.plugin.registry import KERNELS, MODELS, create_plugin, load_plugin
from pagedkv.plugin.resolved_config import resolve_config, resolve_model_settings
from pagedkv.plugin.step_plan import BlockCopy
from pagedkv.plugin.threads import choose_threads

_BINS_PER_OCTAVE = 64
_MIN_EXPONENT, _MAX_EXPONENT = -24, 24
_NUM_BINS = (_MAX_EXPONENT - _MIN_EXPONENT) * _BINS_PER_OCTAVE
_SMALLEST_SCALE = 1e-12
"""Scale of a head whose numbers were all zero."""


class Magnitudes:
    """Histograms of each head's magnitudes (binary logarithms, 64 bins an octave), and the largest magnitude."""

    def __init__(self, num_heads: int) -> None:
        self.absmax = torch.zeros(num_heads)
        self._counts = torch.zeros(num_heads, _NUM_BINS, dtype=torch.int64)

    def add(self, x: torch.Tensor) -> None:
        """Adds x: [num_tokens, num_heads, dim]."""
        magnitudes = x.float().abs().cpu().transpose(0, 1).flatten(1)
        self.absmax = self.absmax.maximum(magnitudes.amax(1))
        bins = ((magnitudes.log2() - _MIN_EXPONENT) * _BINS_PER_OCTAVE).floor().clamp(0, _NUM_BINS - 1).long()
        self._counts.scatter_add_(1, bins, torch.ones_like(bins))

    def percentile(self, percent: float) -> torch.Tensor:
        """Returns the percentile of each head, [num_heads], up to 1.1 % too large; exact for 100."""
        if percent >= 100:
            return self.absmax
        cumulated = self._counts.cumsum(1)
        needed = (cumulated[:, -1:] * (percent / 100)).ceil()
        bins = torch.searchsorted(cumulated.double(), needed.double()).squeeze(1)
        return torch.exp2((bins + 1) / _BINS_PER_OCTAVE + _MIN_EXPONENT).minimum(self.absmax)


class RecordingKernels:
    """Implements `AttentionKernels` with other kernels, and records the magnitudes of stored numbers by layer."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    can_capture_graphs = False

    def __init__(self, kernels: AttentionKernels) -> None:
        self._kernels = kernels
        self.name = kernels.name
        self.recorded: list[tuple[Magnitudes, Magnitudes]] = []
        """Magnitudes of keys and of values of each layer, in the order in which the storage was allocated."""
        self._layer_of_storage: dict[int, int] = {}

    def unsupported_reasons(self, spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype) -> list[str]:
        return self._kernels.unsupported_reasons(spec, cache_spec, dtype)

    def allocate(self, cache_spec: KVCacheSpec, num_blocks: int) -> KVStorage:
        storage = self._kernels.allocate(cache_spec, num_blocks)
        self._layer_of_storage[_identity(storage)] = len(self.recorded)
        self.recorded.append((Magnitudes(cache_spec.num_kv_heads), Magnitudes(cache_spec.num_kv_heads)))
        return storage

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        keys, values = self.recorded[self._layer_of_storage[_identity(storage)]]
        keys.add(k)
        values.add(v)
        self._kernels.store(storage, k, v, metadata)

    def attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        return self._kernels.attend(q, storage, metadata, options)

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        self._kernels.copy_blocks(storage, copies)

    def read(self, storage: KVStorage, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.read(storage, slots)

    @classmethod
    def create(cls, device: torch.device) -> RecordingKernels:
        """Makes kernels that record what the `auto` kernels store."""
        return cls(create_plugin(KERNELS, "auto", {}, device))


def _identity(storage: KVStorage) -> int:
    return storage.tensors["k"].data_ptr()


def calibrate_scales(
    config: Config,
    text_files: Sequence[Path],
    kv_dtype_name: str,
    *,
    percentile: float = 100.0,
    max_tokens: int = 16384,
    sequence_tokens: int = 512,
    max_batch_size: int = 4,
) -> dict[str, torch.Tensor]:
    """Scales that map each head's largest magnitude, or its percentile, to the KV dtype's largest element.

    Args:
        text_files: files of text; empty uses Python's own texts, prose and code.
        max_tokens: total tokens of all kinds of text.

    Returns:
        [num_kv_heads] float32 tensors, with the names of `pagedkv.plugin.kv_scales`.

    Raises:
        ConfigError: the KV dtype has no static variant, or texts are too short.
    """
    static = find_static_variant(find_kv_dtype(kv_dtype_name))
    if not 0 < percentile <= 100:
        raise ConfigError(f"a percentile lies above 0 and up to 100; found {percentile:g}")
    use_threads(choose_threads(config.model.threads))
    settings = resolve_model_settings(config)
    adapter = load_plugin(MODELS, settings.adapter)
    resolved = resolve_config(config, adapter.describe(settings))
    tokenizer = adapter.load_tokenizer(settings)
    texts = load_texts(text_files)
    sequences = [
        sequence
        for text in texts.values()
        for sequence in cut_sequences(text, tokenizer, max_tokens // len(texts), sequence_tokens)
    ]
    kernels = RecordingKernels(create_plugin(KERNELS, resolved.kernels, resolved.plugins, resolved.device))
    run = PagedRun(
        adapter.load(resolved, resolved.device),
        kernels,
        KV_DTYPE_OF_TORCH[resolved.dtype],
        num_rows=max_batch_size,
        max_tokens=sequence_tokens,
        block_size=resolved.cache.block_size,
        device=resolved.device,
    )
    with tqdm(total=len(sequences) * sequence_tokens, desc="calibrate", unit="token", disable=False) as bar:
        _run_sequences(run, sequences, max_batch_size, bar.update)
    return _make_scales(kernels.recorded, percentile, static.max_element)


def _run_sequences(
    run: PagedRun, sequences: Sequence[Sequence[int]], max_batch_size: int, on_tokens: Callable[[int], object]
) -> None:
    for first in range(0, len(sequences), max_batch_size):
        ids = torch.tensor(sequences[first : first + max_batch_size])
        run.forward(ids, 0, has_all_logits=False)
        on_tokens(ids.numel())


def _make_scales(
    recorded: Sequence[tuple[Magnitudes, Magnitudes]], percentile: float, max_element: float
) -> dict[str, torch.Tensor]:
    return {
        name(layer): (magnitudes.percentile(percentile) / max_element).clamp(min=_SMALLEST_SCALE)
        for layer, sides in enumerate(recorded)
        for name, magnitudes in zip((key_scale_name, value_scale_name), sides, strict=True)
    }


def save_scales(scales: Mapping[str, torch.Tensor], file: Path, facts: Mapping[str, str]) -> None:
    """Writes a file for `cache.kv_scales`, with `facts` as metadata. Raises ConfigError if it can't be written."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in scales.items()}, file, metadata=dict(facts))
    except OSError as error:
        raise ConfigError(f"can't write {file}: {error}") from error
