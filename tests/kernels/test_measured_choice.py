"""Choices by measuring: figures kept on disk, broken files, what is taken, and attention that goes to torch."""

import json
import time
from pathlib import Path

import pytest
import torch

from pagedkv.kernels.auto import AutoKernels
from pagedkv.kernels.cpu import attention_choice, measured_choice
from pagedkv.kernels.cpu.attention_choice import AttentionChoice, AttentionShape, choose_attention
from pagedkv.kernels.cpu.library import TileUse
from pagedkv.kernels.cpu.measured_choice import TimingTable, kept_tables, measured_table, time_candidates
from pagedkv.kernels.cpu.provider import CpuKernels
from pagedkv.kernels.reference import ReferenceKernels
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.interface import AttentionKernels
from pagedkv.plugin.kv_dtypes import KVCacheSpec, find_kv_dtype
from pagedkv.plugin.model_spec import AttentionSpec

CASES = {"small": {"ours": 0.001, "theirs": 0.002}}
SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, v_head_dim=64)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for figures. Libraries stay where they are, so that none is compiled again."""
    monkeypatch.setattr(measured_choice, "cache_dir", lambda: tmp_path)
    return tmp_path / "timings"


def refuse() -> dict[str, dict[str, float]]:
    raise AssertionError("measured again")


def titled(work: str) -> str:
    return f"{work}, on {torch.get_num_threads()} threads"


def test_figures_are_measured_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    first = measured_table("work", lambda: CASES)
    assert measured_table("work", refuse) == first == TimingTable(titled("work"), CASES)
    assert "small: ours 1.000*, theirs 2.000 ms" in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO"]
    with pytest.raises(AssertionError, match="measured again"):
        measured_table("other work", refuse)


def test_figures_belong_to_a_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_table("work", lambda: CASES)
    before = titled("work")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(AssertionError, match="measured again"):
        measured_table("work", refuse)
    measured_table("work", lambda: CASES)
    assert [kept.title for kept in kept_tables()] == sorted([before, "work, on 77 threads"])


def test_figures_belong_to_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_table("work", lambda: CASES)
    monkeypatch.setattr(measured_choice, "cpu_description", lambda: "another CPU")
    assert kept_tables() == []
    with pytest.raises(AssertionError, match="measured again"):
        measured_table("work", refuse)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"title": "work", "cases": {}}',
        '{"title": "work", "cases": {"small": {}}}',
        '{"title": "work", "cases": {"small": {"ours": "fast"}}}',
        '{"title": "work", "cases": {"small": {"ours": 0}}}',
        '{"title": "work", "cases": {"small": {"ours": NaN}}}',
        '{"title": "work", "cases": [1]}',
        '{"title": "other", "cases": {"small": {"ours": 1}}}',
    ],
)
def test_a_broken_file_is_measured_again(folder: Path, content: str) -> None:
    measured_table("work", lambda: CASES)
    [path] = folder.glob("*.json")
    path.write_text(content)
    assert measured_table("work", lambda: CASES).cases == CASES
    assert json.loads(path.read_text())["cases"] == CASES
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_costs_the_figures_alone(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(measured_choice.os, "replace", fail)
    assert measured_table("work", lambda: CASES).cases == CASES
    assert "no space left on device" in caplog.text
    assert list(folder.iterdir()) == []


def test_candidates_run_by_turns_and_at_least_twice() -> None:
    calls: list[str] = []
    seconds = time_candidates({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, max_s=0)
    assert calls == ["a", "b", "a", "b"]
    assert set(seconds) == {"a", "b"}
    assert all(0 < value < 60 for value in seconds.values())


def test_the_slower_takes_longer() -> None:
    seconds = time_candidates({"slow": lambda: time.sleep(0.01), "quick": lambda: None}, max_s=0.02)
    assert seconds["quick"] < seconds["slow"]


def table(**seconds: tuple[float, ...]) -> TimingTable:
    """Figures of candidates: a short and a long decode, a short and a long prompt."""
    cases = ("decode of 1 token", "decode of 2 tokens", "prompt of 3 tokens", "prompt of 4 tokens")
    columns = {name: dict(zip(cases, values, strict=True)) for name, values in seconds.items()}
    return TimingTable(
        "attention",
        {
            case: {name: c[case] for name, c in columns.items() if not (name == "torch" and "decode" in case)}
            for case in cases
        },
    )


@pytest.mark.parametrize(
    ("figures", "choice"),
    [
        ({"vectors": (1, 1, 1, 1)}, AttentionChoice()),
        ({"vectors": (1, 1, 1, 1), "tiles": (2, 2, 2, 2)}, AttentionChoice()),
        ({"vectors": (1, 1, 1, 1), "tiles": (2, 2, 0.5, 0.5)}, AttentionChoice(TileUse.PROMPTS)),
        ({"vectors": (1, 1, 1, 1), "tiles": (0.9, 0.9, 2, 0.1)}, AttentionChoice(TileUse.DECODES | TileUse.PROMPTS)),
    ],
)
def test_the_fastest_is_chosen(figures: dict[str, tuple[float, ...]], choice: AttentionChoice) -> None:
    assert choose_attention(table(**figures, torch=(1, 1, 0.9, 0.9))) == choice


def test_torch_must_win_clearly_and_everywhere() -> None:
    assert choose_attention(table(vectors=(1, 1, 1, 1), torch=(9, 9, 0.7, 0.7))).uses_torch
    assert not choose_attention(table(vectors=(1, 1, 1, 1), torch=(9, 9, 0.9, 0.1))).uses_torch
    assert not choose_attention(table(vectors=(1, 1, 1, 1), tiles=(1, 1, 0.5, 0.5), torch=(9, 9, 0.7, 0.7))).uses_torch


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8_static", "int4"])
def test_auto_measures_each_shape_and_keeps_it(kv_dtype: str) -> None:
    spec = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=32, v_head_dim=32)
    cache_spec = spec.cache_spec(16, find_kv_dtype(kv_dtype))
    for _ in range(2):
        kernels = AutoKernels.create(torch.device("cpu"))
        assert not kernels.unsupported_reasons(spec, cache_spec, torch.bfloat16)
        kernels.allocate(cache_spec, 4)
        [kept] = kept_tables()
    assert set(kept.cases) == {
        *(f"decode of {length} tokens" for length in attention_choice.DECODE_LENGTHS),
        *(f"prompt of {length} tokens" for length in attention_choice.PROMPT_LENGTHS),
    }
    assert f"KV {kv_dtype}" in kept.title


def test_shapes_may_differ_in_what_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers, one's prompts go to torch."""
    wide = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128, v_head_dim=128)
    specs = {spec: spec.cache_spec(16, find_kv_dtype("bf16")) for spec in (SPEC, wide)}

    def choose(_: object, __: object, shape: AttentionShape) -> AttentionChoice:
        return AttentionChoice(uses_torch=shape.cache_spec.head_dim == 128)

    monkeypatch.setattr("pagedkv.kernels.cpu.provider.measure_attention", choose)
    kernels = CpuKernels.create(torch.device("cpu"))
    plain = CpuKernels(torch.device("cpu"), choice=AttentionChoice())
    kernels.measure([(spec, cache_spec, torch.bfloat16) for spec, cache_spec in specs.items()])
    for spec, cache_spec in specs.items():
        ours, vectors = (run(one, spec, cache_spec, [(300, 300)]) for one in (kernels, plain))
        assert torch.equal(ours[0], vectors[0]) is (spec is SPEC)


def run(
    kernels: AttentionKernels,
    spec: AttentionSpec,
    cache_spec: KVCacheSpec,
    lengths: list[tuple[int, int]],
    options: AttentionOptions = AttentionOptions(scale=0.125),  # noqa: B008  frozen
) -> list[torch.Tensor]:
    """Attention of sequences of (context, queries), each with tokens drawn from its own length."""
    counts = [-(-context // cache_spec.block_size) for context, _ in lengths]
    storage = kernels.allocate(cache_spec, sum(counts))
    tables = torch.full((len(lengths), max(counts)), -7, dtype=torch.int32)
    queries = []
    for row, (context, count) in enumerate(lengths):
        generator = torch.Generator().manual_seed(context)
        first = sum(counts[:row])
        tables[row, : counts[row]] = torch.arange(first, first + counts[row])
        k, v = torch.randn(2, context, spec.num_kv_heads, spec.head_dim, generator=generator).bfloat16()
        kernels.store(storage, k, v, make_metadata([context], [context], tables[row : row + 1], first * 16))
        queries.append(torch.randn(count, spec.num_heads, spec.head_dim, generator=generator).bfloat16())
    num_queries = [count for _, count in lengths]
    metadata = make_metadata([context for context, _ in lengths], num_queries, tables, 0)
    return list(kernels.attend(torch.cat(queries), storage, metadata, options).split(num_queries))


def make_metadata(
    seq_lens: list[int], num_queries: list[int], tables: torch.Tensor, first_slot: int
) -> AttentionMetadata:
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *num_queries]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=tables,
        slot_mapping=torch.arange(sum(num_queries)) + first_slot,
        max_query_len=max(num_queries),
        max_seq_len=max(seq_lens),
        num_decodes=sum(count == 1 for count in num_queries),
    )


def test_torch_gets_whole_prompts_alone() -> None:
    """Others in the batch have the bits that they have without it, and a prompt those that it has alone."""
    cache_spec = SPEC.cache_spec(16, find_kv_dtype("bf16"))
    dense = CpuKernels(torch.device("cpu"), choice=AttentionChoice(uses_torch=True))
    plain = CpuKernels(torch.device("cpu"), choice=AttentionChoice())
    lengths = [(700, 1), (300, 300), (600, 290), (256, 256), (255, 255), (33, 33)]
    ours, vectors = (run(kernels, SPEC, cache_spec, lengths) for kernels in (dense, plain))
    exact = run(ReferenceKernels.create(torch.device("cpu")), SPEC, cache_spec, lengths)
    for one, other, right, length in zip(ours, vectors, exact, lengths, strict=True):
        assert torch.equal(one, other) is (length not in ((300, 300), (256, 256))), length
        torch.testing.assert_close(one, right, atol=0.01, rtol=0.02)
    assert torch.equal(run(dense, SPEC, cache_spec, [(300, 300)])[0], ours[1])


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.125, sliding_window=40),
        AttentionOptions(0.125, softcap=20.0),
        AttentionOptions(0.125, sinks=torch.zeros(6)),
        AttentionOptions(0.125, alibi_slopes=torch.ones(6)),
    ],
)
def test_torch_gets_no_attention_with_options(options: AttentionOptions) -> None:
    cache_spec = SPEC.cache_spec(16, find_kv_dtype("bf16"))
    dense = CpuKernels(torch.device("cpu"), choice=AttentionChoice(uses_torch=True))
    plain = CpuKernels(torch.device("cpu"), choice=AttentionChoice())
    ours, vectors = (run(kernels, SPEC, cache_spec, [(300, 300)], options)[0] for kernels in (dense, plain))
    assert torch.equal(ours, vectors)
