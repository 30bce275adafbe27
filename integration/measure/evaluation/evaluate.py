"""`pagedkv eval-kv` without its command line: measures accuracy and bytes of each KV dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from pagedkv.integration.measure.evaluation.accuracy import generate_greedily, measure_accuracy, share_equal
from pagedkv.integration.measure.evaluation.paged_run import PagedRun
from pagedkv.integration.measure.evaluation.recall import RecallTask, make_recall_tasks, measure_recall
from pagedkv.integration.measure.evaluation.report import KindResult, Report
from pagedkv.integration.measure.evaluation.texts import TextKind, cut_sequences, load_texts
from pagedkv.plugin.assemble import use_threads
from pagedkv.plugin.config import Config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import ModelAdapter, Tokenizer
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH, find_kv_dtype
from pagedkv.plugin.kv_scales import read_kv_scales
from pagedkv.plugin.registry import KERNELS, MODELS, create_plugin, load_plugin
from pagedkv.plugin.resolved_config import ResolvedConfig, resolve_config, resolve_model_settings
from pagedkv.plugin.threads import choose_threads

DEFAULT_KV_DTYPES = ("bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    text_files: Sequence[Path] = ()
    """Files of text; empty uses Python's own texts."""
    kv_dtypes: Sequence[str] = DEFAULT_KV_DTYPES
    kv_scales: str = ""
    """File of scales, for KV dtypes with static scales."""
    max_tokens: int = 20480
    """Tokens of each kind of text."""
    sequence_tokens: int = 512
    chunk_tokens: int = 32
    max_batch_size: int = 16
    greedy_prompt_tokens: int = 128
    greedy_tokens: int = 128
    max_greedy_prompts: int = 8
    recall_tokens: int = 1024
    """Tokens of a recall prompt; 0 leaves recall out."""
    recall_depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    num_recall_facts: int = 4
    seed: int = 0


@dataclass
class _Evaluator:
    config: ResolvedConfig
    settings: EvaluationSettings
    model: ModelAdapter
    tokenizer: Tokenizer
    kernels_names: dict[str, str] = field(default_factory=dict)

    @property
    def unquantized(self) -> str:
        return KV_DTYPE_OF_TORCH[self.config.dtype].name

    def make_run(self, kv_dtype_name: str, num_rows: int, max_tokens: int) -> PagedRun:
        kv_dtype = find_kv_dtype(kv_dtype_name)
        scales = None
        if kv_dtype.has_static_scales:
            scales = read_kv_scales(self.settings.kv_scales, self.model.spec.layers, self.config.device)
        run = PagedRun(
            self.model,
            create_plugin(KERNELS, self.config.kernels, self.config.plugins, self.config.device),
            kv_dtype,
            num_rows=num_rows,
            max_tokens=max_tokens,
            block_size=self.config.cache.block_size,
            device=self.config.device,
            static_scales=scales,
        )
        self.kernels_names[kv_dtype_name] = run.kernels_name
        return run

    def evaluate_kind(self, kind: TextKind, text: str) -> dict[str, KindResult]:
        settings = self.settings
        sequences = cut_sequences(text, self.tokenizer, settings.max_tokens, settings.sequence_tokens)
        with tqdm(total=len(sequences) * settings.sequence_tokens, desc=kind, unit="token", disable=False) as bar:
            sums = measure_accuracy(
                self.make_run,
                self.unquantized,
                settings.kv_dtypes,
                sequences,
                chunk_tokens=settings.chunk_tokens,
                max_batch_size=settings.max_batch_size,
                on_tokens=bar.update,
            )
        greedy = self._compare_greedy(kind, sequences)
        return {name: KindResult(sums[name], greedy[name]) for name in settings.kv_dtypes}

    def _compare_greedy(self, kind: TextKind, sequences: Sequence[Sequence[int]]) -> dict[str, float]:
        settings = self.settings
        prompts = torch.tensor(sequences[: settings.max_greedy_prompts])[:, : settings.greedy_prompt_tokens]
        max_tokens = prompts.shape[1] + settings.greedy_tokens
        names = list(dict.fromkeys((self.unquantized, *settings.kv_dtypes)))
        total = len(names) * len(prompts) * (settings.greedy_tokens - 1)
        with tqdm(total=total, desc=f"{kind}, greedy", unit="token", disable=False) as bar:
            tokens = {
                name: generate_greedily(
                    self.make_run(name, len(prompts), max_tokens), prompts, settings.greedy_tokens, bar.update
                )
                for name in names
            }
        return {name: share_equal(tokens[self.unquantized], tokens[name]) for name in settings.kv_dtypes}

    def evaluate_recall(self, filler: str) -> dict[str, Mapping[float, float]]:
        settings = self.settings
        if not settings.recall_tokens:
            return {}
        tasks = make_recall_tasks(
            filler,
            self.tokenizer,
            settings.recall_tokens,
            settings.recall_depths,
            settings.num_recall_facts,
            settings.seed,
        )
        names = list(dict.fromkeys((self.unquantized, *settings.kv_dtypes)))
        with tqdm(total=len(names) * len(tasks), desc="recall", unit="depth", disable=False) as bar:
            return {name: {task.depth: self._recall(name, task, bar.update) for task in tasks} for name in names}

    def _recall(self, kv_dtype_name: str, task: RecallTask, on_task: Callable[[int], object]) -> float:
        max_tokens = task.prompts.shape[1] + task.answers.shape[1]
        share = measure_recall(self.make_run(kv_dtype_name, len(task.prompts), max_tokens), task)
        on_task(1)
        return share


def evaluate(config: Config, settings: EvaluationSettings) -> Report:
    """Loads the model and measures. Shows progress on standard error.

    Raises:
        ConfigError: texts can't be read or are too short, or a static KV dtype has no scales.
        UnsupportedError: the kernels can't run one of the KV dtypes on this model.
    """
    evaluator = _load(config, settings)
    texts = load_texts(settings.text_files)
    results = {kind: evaluator.evaluate_kind(kind, text) for kind, text in texts.items()}
    recall = evaluator.evaluate_recall("\n\n".join(texts.values()))
    spec, block_size = evaluator.model.spec, evaluator.config.cache.block_size
    return Report(
        model=config.model.path,
        unquantized=evaluator.unquantized,
        kernels=evaluator.kernels_names,
        block_size=block_size,
        results={name: {kind: results[kind][name] for kind in results} for name in settings.kv_dtypes},
        recall=recall,
        recall_tokens=settings.recall_tokens,
        bytes_per_token={
            name: spec.bytes_per_block(block_size, find_kv_dtype(name)) / block_size for name in settings.kv_dtypes
        },
    )


def _load(config: Config, settings: EvaluationSettings) -> _Evaluator:
    is_static = [name for name in settings.kv_dtypes if find_kv_dtype(name).has_static_scales]
    if is_static and not settings.kv_scales:
        raise ConfigError(f"{', '.join(is_static)} takes scales from a file: give one, made by pagedkv calibrate")
    model_settings = resolve_model_settings(config)
    use_threads(choose_threads(config.model.threads))
    adapter = load_plugin(MODELS, model_settings.adapter)
    resolved = resolve_config(config, adapter.describe(model_settings))
    tokenizer = adapter.load_tokenizer(model_settings)
    return _Evaluator(resolved, settings, adapter.load(resolved, resolved.device), tokenizer)
