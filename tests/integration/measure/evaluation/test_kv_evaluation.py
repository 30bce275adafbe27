"""`pagedkv calibrate` and `pagedkv eval-kv`, their measures, and what they say of a model without QK norm."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedkv.integration.measure.calibration import Magnitudes
from pagedkv.integration.measure.evaluation.evaluate import EvaluationSettings, evaluate
from pagedkv.integration.measure.evaluation.measures import AccuracySums
from pagedkv.integration.measure.evaluation.paged_run import PagedRun
from pagedkv.integration.measure.evaluation.recall import make_recall_tasks
from pagedkv.integration.measure.evaluation.texts import cut_sequences, load_texts
from pagedkv.plugin.config import load_config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.kv_dtypes import FP32
from pagedkv.plugin.kv_scales import read_kv_scales
from pagedkv.plugin.model_spec import AttentionSpec
from pagedkv.plugin.registry import KERNELS, MODELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config, resolve_model_settings

PROSE = "The quick brown fox jumps over the lazy dog, and the dog dreams of the fox. " * 60
CODE = "def fox(dog: int) -> int:\n    return sum(range(dog))\n\n\n" * 60


class ByteTokenizer:
    """A token a byte."""

    all_special_ids = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama over bytes, with its tokenizer."""
    folder = tmp_path_factory.mktemp("bytes")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=1024,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Arguments of the command: a file of prose, one of code."""
    (tmp_path / "fox.txt").write_text(PROSE)
    (tmp_path / "fox.py").write_text(CODE)
    return ["--text", str(tmp_path / "fox.txt"), "--text", str(tmp_path / "fox.py")]


@pytest.mark.slow
def test_eval_kv_reports_every_dtype_on_prose_and_on_code(
    pagedkv: Callable[..., Any], byte_model: Path, texts: list[str]
) -> None:
    sizes = ("--max-tokens", 384, "--sequence-tokens", 192, "--recall-tokens", 192, "--set", "kernels.name=reference")
    outcome = pagedkv("eval-kv", byte_model, *texts, *sizes, "--json")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert report["unquantized"] == "fp32"
    assert set(report["results"]) == {"bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"}
    losses = {}
    for name, kinds in report["results"].items():
        assert set(kinds) == {"prose", "code"}
        for result in kinds.values():
            assert result["num_tokens"] == 2 * 191
            assert result["ppl_ratio"] == pytest.approx(1, abs=0.05)
            assert 0 <= result["top1"] <= 1
            assert 0 <= result["greedy_equal"] <= 1
            assert {path: means["num_tokens"] for path, means in result["paths"].items()} == {
                "chunked": 2 * 96,
                "decode": 2 * 95,
            }
        losses[name] = kinds["prose"]["kl"]
    assert losses["bf16"] < losses["fp8_e4m3"] < losses["fp8_e5m2"]
    assert losses["int8"] < losses["int4"]
    assert report["results"]["int8"]["code"]["bytes_per_token"] == 2 * (64 + 64 // 8)  # two layers, head size 32
    assert set(report["recall"]["int4"]) == {"0", "0.25", "0.5", "0.75", "1"}


def test_eval_kv_prints_a_table(pagedkv: Callable[..., Any], byte_model: Path, texts: list[str]) -> None:
    sizes = ("--max-tokens", 64, "--sequence-tokens", 64, "--recall-tokens", 0, "--kv-dtype", "int8")
    outcome = pagedkv("eval-kv", byte_model, *texts[:2], *sizes)
    assert outcome.code == 0, outcome.err
    assert "int8" in outcome.out
    assert "prose" in outcome.out


def test_calibrated_scales_fit_and_are_evaluated(
    pagedkv: Callable[..., Any], byte_model: Path, texts: list[str], tmp_path: Path
) -> None:
    sizes = ("--max-tokens", 256, "--sequence-tokens", 64)
    found = {}
    for name, percentile in (("whole", 100), ("most", 90)):
        file = tmp_path / f"{name}.safetensors"
        options = ("--kv-dtype", "int8", "-o", file, "--percentile", percentile, "--json")
        outcome = pagedkv("calibrate", byte_model, *texts, *sizes, *options)
        assert outcome.code == 0, outcome.err
        assert json.loads(outcome.out)["num_layers"] == 2
        found[name] = read_kv_scales(str(file), (AttentionSpec(2, 1, 32, 32),) * 2, torch.device("cpu"))
    for whole, most in zip(found["whole"], found["most"], strict=True):
        for one, other in zip(whole, most, strict=True):
            assert (other > 0).all()
            assert (other < one).all()
    options = ("--kv-dtype", "int8_static", "--kv-scales", tmp_path / "whole.safetensors", "--recall-tokens", 0)
    outcome = pagedkv("eval-kv", byte_model, *texts, *sizes, *options, "--json")
    assert outcome.code == 0, outcome.err
    prose = json.loads(outcome.out)["results"]["int8_static"]["prose"]
    assert prose["ppl_ratio"] == pytest.approx(1, abs=0.01)
    assert prose["bytes_per_token"] == 2 * 64


def test_faults_are_explained(pagedkv: Callable[..., Any], byte_model: Path, tmp_path: Path) -> None:
    outcome = pagedkv("calibrate", byte_model, "--kv-dtype", "int4", "-o", tmp_path / "x")
    assert (outcome.code, "int4 takes no scales from outside" in outcome.err) == (2, True)
    outcome = pagedkv("eval-kv", byte_model, "--kv-dtype", "fp8_e4m3_static")
    assert (outcome.code, "made by pagedkv calibrate" in outcome.err) == (2, True)
    outcome = pagedkv("eval-kv", byte_model, "--text", tmp_path / "absent.txt")
    assert (outcome.code, "can't read the text" in outcome.err) == (2, True)


def test_a_sequence_has_the_same_logits_in_chunks_and_token_by_token(byte_model: Path) -> None:
    """As `eval-kv` runs it, with the kernels and the decoder that it takes by default."""
    config = load_config(None, {"model.path": str(byte_model)}, {})
    resolved = resolve_config(config, load_plugin(MODELS, "transformers").describe(resolve_model_settings(config)))
    model = load_plugin(MODELS, "transformers").load(resolved, resolved.device)
    kernels = load_plugin(KERNELS, resolved.kernels).create(resolved.device)
    ids = torch.tensor([list(PROSE.encode()[start : start + 24]) for start in (0, 40, 300)])
    whole, stepped = (
        PagedRun(model, kernels, FP32, num_rows=3, max_tokens=24, block_size=8, device=resolved.device) for _ in "ab"
    )
    expected = whole.forward(ids, 0)
    for place in range(24):
        torch.testing.assert_close(stepped.forward(ids[:, place : place + 1], place)[:, 0], expected[:, place])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_default_dtypes_stay_near_on_a_model_whose_keys_have_outliers(demo_model: Path) -> None:
    """SmolLM2 has no QK norm, and channels of its keys are ten times as large as others. Bounds are some three times
    what 20,000 tokens give."""
    settings = EvaluationSettings(
        kv_dtypes=("int8", "fp8_e4m3", "int4"),
        max_tokens=192,
        sequence_tokens=48,
        recall_tokens=0,
        greedy_tokens=1,
        max_greedy_prompts=1,
    )
    config = load_config(None, {"model.path": str(demo_model), "kernels.name": "reference"}, {})
    results = evaluate(config, settings).results
    for name, bound in (("int8", 0.004), ("fp8_e4m3", 0.015), ("int4", 0.07)):
        for kind in ("prose", "code"):
            assert results[name][kind].sums.total().kl < bound, (name, kind)


def test_measures_of_distributions_by_hand() -> None:
    unquantized = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    quantized = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    sums = AccuracySums()
    sums.add(unquantized, quantized, torch.tensor([0, 1]))
    means = sums.merge(AccuracySums()).means()
    assert means.num_tokens == 2
    assert means.ppl == pytest.approx((1 / 0.25 / 0.8) ** 0.5)
    assert means.ppl_ratio == pytest.approx(2**0.5)
    assert means.kl == pytest.approx((0.5 * 0.6931472 - 0.25 * 0.6931472) / 2)
    assert means.top1 == 0.5


def test_a_percentile_is_a_little_above_the_exact_one() -> None:
    x = torch.randn(500, 3, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1e-3, 50.0])[:, None]
    magnitudes = Magnitudes(3)
    for part in x.split(100):
        magnitudes.add(part)
    flat = x.abs().transpose(0, 1).flatten(1)
    assert torch.equal(magnitudes.percentile(100), flat.amax(1))
    for percent in (50, 99, 99.9):
        rank = math.ceil(flat.shape[1] * percent / 100)
        ratio = magnitudes.percentile(percent) / flat.kthvalue(rank, dim=1).values
        assert (ratio >= 1).all()
        assert (ratio <= 1.012).all()


def test_a_fact_is_hidden_at_its_depth() -> None:
    tasks = make_recall_tasks("x" * 1000, ByteTokenizer(), 400, (0.0, 0.5, 1.0), 2, seed=3)  # type: ignore[arg-type]
    for task in tasks:
        assert task.prompts.shape == (2, 400)
        for prompt, answer in zip(task.prompts.tolist(), task.answers.tolist(), strict=True):
            text, code = bytes(prompt).decode(), bytes(answer).decode()
            assert text.count(code) == 1
            before, after = text.index("\n\nThe secret code"), len(text) - text.index("\n\nQuestion")
            assert before == pytest.approx(task.depth * (400 - after - len(code)), abs=60)
    with pytest.raises(ConfigError, match="needs a filler"):
        make_recall_tasks("short", ByteTokenizer(), 400, (0.5,), 1, seed=3)  # type: ignore[arg-type]


def test_python_brings_enough_text_of_both_kinds() -> None:
    texts = load_texts(())
    assert set(texts) == {"prose", "code"}
    # 20,480 tokens of a common vocabulary are some 80,000 characters.
    assert all(len(text) > 200_000 for text in texts.values())
    sequences = cut_sequences(texts["code"], ByteTokenizer(), 1000, 300)  # type: ignore[arg-type]
    assert [len(sequence) for sequence in sequences] == [300] * 3
