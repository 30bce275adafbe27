"""Logits to tokens, all rows of a step at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.plugin.requests import SamplingParams
from pagedkv.plugin.sampling import SampledToken, Sampler, SamplingRow

CPU = torch.device("cpu")
VOCAB_SIZE = 40
BIG_SEED = 2**64 - 1

KINDS: list[dict[str, Any]] = [
    {},
    {"top_n_tokens": 3},
    {"watermark": True},
    {"repetition_penalty": 1.4},
    {"relative_frequency_penalty": -1.5, "repetition_penalty": 0.8},
    {"do_sample": True},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"typical_p": 0.8},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "typical_p": 0.95, "top_n_tokens": 2},
    {"min_p": 0.2},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"min_new_tokens": 9, "stop_token_ids": (5, 11), "raw_logprobs": True},
    {"do_sample": True, "frequency_penalty": 0.3, "min_p": 0.05, "raw_logprobs": True},
    {"do_sample": True, "watermark": True, "repetition_penalty": 1.2, "relative_frequency_penalty": 1.0},
]


def make_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def make_row(num_generated_tokens: int = 0, num_prompt_tokens: int = 4, **params: Any) -> SamplingRow:
    row = SamplingRow.create(SamplingParams(**params), [i % VOCAB_SIZE for i in range(7, 7 + num_prompt_tokens)])
    row.token_ids.extend([3, 5, 3] * num_generated_tokens)
    del row.token_ids[num_prompt_tokens + num_generated_tokens :]
    return row


def sample_one(logits: torch.Tensor, row: SamplingRow) -> SampledToken:
    [sampled] = Sampler(logits.shape[-1], CPU).sample(logits.reshape(1, -1), [row])
    return sampled


def excess_chi_square(token_ids: list[int], probs: torch.Tensor) -> float:
    """Of the tokens' counts against what is expected, in standard deviations above the mean."""
    assert all(probs[i] > 0 for i in set(token_ids))
    counts = np.bincount(token_ids, minlength=len(probs))
    expected = probs.double().numpy() * len(token_ids)
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = max(1, len(wanted) - 1)
    return float((((observed - wanted) ** 2 / wanted).sum() - degrees) / np.sqrt(2 * degrees))


def test_no_rows() -> None:
    assert Sampler(VOCAB_SIZE, CPU).sample(torch.empty(0, VOCAB_SIZE), []) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, VOCAB_SIZE, 30_000])
def test_greedy_takes_the_best_token_and_its_log_softmax(vocab_size: int, dtype: torch.dtype) -> None:
    num_rows = 37  # several chunks of the large vocabulary
    logits = make_logits(num_rows, vocab_size).to(dtype)
    sampled = Sampler(vocab_size, CPU).sample(logits, [make_row() for _ in range(num_rows)])
    expected = logits.double().log_softmax(-1).max(-1)
    assert [logits[i, one.token.token_id] for i, one in enumerate(sampled)] == logits.max(-1).values.tolist()
    assert [one.token.logprob for one in sampled] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert all(one.top_tokens == () for one in sampled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("penalty", [1.0, 1.0001])
def test_of_equal_best_tokens_the_first_is_taken(dtype: torch.dtype, penalty: float) -> None:
    logits = torch.zeros(2, 5000, dtype=dtype)
    logits[0, [4000, 17, 123]] = 2
    logits[1, [4999, 4998]] = 1
    sampled = Sampler(5000, CPU).sample(logits, [make_row(repetition_penalty=penalty) for _ in range(2)])
    assert [one.token.token_id for one in sampled] == [17, 4998]


def test_logits_and_tokens_stay_as_they_are() -> None:
    logits = make_logits(len(KINDS))
    rows = [make_row(num_generated_tokens=5, **kind) for kind in KINDS]
    before = logits.clone(), [list(row.token_ids) for row in rows]
    Sampler(VOCAB_SIZE, CPU).sample(logits, rows)
    assert torch.equal(logits, before[0])
    assert [row.token_ids for row in rows] == before[1]


@given(st.permutations(range(2 * len(KINDS))), st.integers(1, 2 * len(KINDS)))
def test_a_row_s_token_does_not_depend_on_the_batch(order: list[int], num_rows: int) -> None:
    """Any rows, in any order, of any kinds: each gets what it gets alone."""
    logits = make_logits(2 * len(KINDS))
    rows = [make_row(num_generated_tokens=i % 7, seed=i, **KINDS[i % len(KINDS)]) for i in range(2 * len(KINDS))]
    picked = order[:num_rows]
    together = Sampler(VOCAB_SIZE, CPU).sample(logits[picked], [rows[i] for i in picked])
    for i, sampled in zip(picked, together, strict=True):
        alone = sample_one(logits[i], rows[i])
        assert sampled.token.token_id == alone.token.token_id
        assert sampled.token.logprob == pytest.approx(alone.token.logprob, abs=1e-6)
        assert [t.token_id for t in sampled.top_tokens] == [t.token_id for t in alone.top_tokens]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_broken_row_leaves_the_others_as_they_are(kind: dict[str, Any], bad: float) -> None:
    rows = [make_row(num_generated_tokens=2, seed=i, **kind) for i in range(3)]
    good = make_logits(3)
    broken = good.clone()
    broken[1] = bad
    sampler = Sampler(VOCAB_SIZE, CPU)
    before, after = sampler.sample(good, rows), sampler.sample(broken, rows)
    assert (after[0], after[2]) == (before[0], before[2])
    assert 0 <= after[1].token.token_id < VOCAB_SIZE


@pytest.mark.parametrize("seed", [0, 1, BIG_SEED])
def test_a_request_computed_again_goes_on_with_the_same_draws(seed: int) -> None:
    """Half way through, its row is made anew, as after preemption, in another sampler."""
    logits = make_logits(20)

    def generate(row: SamplingRow, num_tokens: int) -> list[int]:
        for _ in range(num_tokens):
            token = sample_one(logits[row.num_generated_tokens], row).token
            row.token_ids.append(token.token_id)
        return row.token_ids

    params = SamplingParams(do_sample=True, repetition_penalty=1.1, seed=seed)
    unbroken = generate(SamplingRow.create(params, [1, 2]), 20)
    first_half = generate(SamplingRow.create(params, [1, 2]), 10)
    again = SamplingRow(params=params, seed=seed, token_ids=list(first_half), num_prompt_tokens=2)
    assert generate(again, 10) == unbroken
    assert len(set(unbroken)) > 5


def test_a_fresh_seed_for_each_request_without_one() -> None:
    rows = [make_row(do_sample=True) for _ in range(50)]
    assert len({row.seed for row in rows}) == 50
    assert make_row(seed=0).seed == 0
    assert make_row(seed=BIG_SEED).seed == BIG_SEED


@pytest.mark.parametrize("kind", [kind for kind in KINDS if SamplingParams(**kind).is_sampled], ids=str)
def test_draws_follow_the_distribution_over_seeds(kind: dict[str, Any]) -> None:
    num_draws = 5000
    logits = make_logits(1).expand(num_draws, -1)
    sampled = Sampler(VOCAB_SIZE, CPU).sample(logits, [make_row(seed=i, **kind) for i in range(num_draws)])
    token_ids = [one.token.token_id for one in sampled]
    probs = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    for one in sampled:
        probs[one.token.token_id] = np.exp(one.token.logprob)
    assert probs.sum() == pytest.approx(1, abs=0.01)  # but for what was too rare to be drawn
    assert excess_chi_square(token_ids, probs / probs.sum()) < 4


@pytest.mark.parametrize("seed", [0, 42, BIG_SEED])
def test_draws_follow_the_distribution_over_the_steps_of_a_seed(seed: int) -> None:
    num_draws = 5000
    logits = make_logits(1)
    params = SamplingParams(do_sample=True, seed=seed)
    rows = [SamplingRow(params, seed, [0] * (1 + step), 1) for step in range(num_draws)]
    sampled = Sampler(VOCAB_SIZE, CPU).sample(logits.expand(num_draws, -1), rows)
    token_ids = [one.token.token_id for one in sampled]
    assert excess_chi_square(token_ids, logits[0].softmax(-1)) < 4


def test_neighbouring_seeds_draw_independently() -> None:
    """Pairs of tokens drawn with seed and seed + 1 follow the product of their distributions."""
    num_draws = 8000
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    rows = [SamplingRow.create(SamplingParams(do_sample=True, seed=i), [0]) for i in range(num_draws)]
    sampled = Sampler(4, CPU).sample(logits.expand(num_draws, -1), rows)
    ids = [one.token.token_id for one in sampled]
    pairs = [4 * first + second for first, second in zip(ids[::2], ids[1::2], strict=True)]
    probs = logits.double().softmax(-1)
    assert excess_chi_square(pairs, torch.outer(probs, probs).flatten()) < 4


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((2000, 9), -torch.inf)
    logits[:, [2, 6]] = 0.0
    sampled = Sampler(9, CPU).sample(logits, [make_row(do_sample=True, seed=i) for i in range(2000)])
    assert {one.token.token_id for one in sampled} == {2, 6}


@pytest.mark.parametrize("kind", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}], ids=str)
def test_a_lone_candidate_is_the_best_token_with_probability_one(kind: dict[str, Any]) -> None:
    logits = make_logits(20)
    sampled = Sampler(VOCAB_SIZE, CPU).sample(logits, [make_row(**kind) for _ in range(20)])
    assert [one.token.token_id for one in sampled] == logits.argmax(-1).tolist()
    assert [str(one.token.logprob) for one in sampled] == ["0.0"] * 20


def test_a_vocabulary_of_one_token_has_no_negative_zero() -> None:
    kinds: list[dict[str, Any]] = [{}, {"do_sample": True}, {"relative_frequency_penalty": 0.1}]
    rows = [SamplingRow.create(SamplingParams(**kind), [0]) for kind in kinds]
    sampled = Sampler(1, CPU).sample(torch.tensor([[3.0]] * 3), rows)
    assert [str(one.token.logprob) for one in sampled] == ["0.0"] * 3


def test_logprob_is_after_the_warpers_and_top_tokens_are_before() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    row = SamplingRow.create(SamplingParams(top_k=2, temperature=0.5, top_n_tokens=2, seed=1), [0])
    sampled = sample_one(logits, row)
    warped = torch.tensor([-torch.inf, 4.0, 2.0, -torch.inf]).log_softmax(-1)
    assert sampled.token.logprob == pytest.approx(warped[sampled.token.token_id].item(), abs=1e-6)
    own = logits.log_softmax(-1)
    assert [t.token_id for t in sampled.top_tokens] == [1, 2]
    assert [t.logprob for t in sampled.top_tokens] == pytest.approx([own[1].item(), own[2].item()], abs=1e-6)


def test_order_is_watermark_then_repetition_then_frequency() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[:] = torch.linspace(-1, 1, VOCAB_SIZE)
    row = make_row(watermark=True, repetition_penalty=2.0, relative_frequency_penalty=2.0, num_generated_tokens=3)
    permutation = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(15485863 * row.token_ids[-1]))
    scores = logits.clone()
    scores[permutation[: VOCAB_SIZE // 2]] += 2.0
    for token_id in set(row.token_ids):
        scores[token_id] = scores[token_id] * 2.0 if scores[token_id] < 0 else scores[token_id] / 2.0
        scores[token_id] -= 2.0 * row.token_ids.count(token_id) / len(row.token_ids)
    sampled = sample_one(logits, row)
    assert sampled.token.token_id == int(scores.argmax())
    assert sampled.token.logprob == pytest.approx(scores.log_softmax(-1).max().item(), abs=1e-6)


def test_watermark_of_other_strength() -> None:
    sampler = Sampler(VOCAB_SIZE, CPU, watermark_gamma=0.1, watermark_delta=100.0)
    [sampled] = sampler.sample(make_logits(1), [row := make_row(watermark=True)])
    permutation = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(15485863 * row.token_ids[-1]))
    assert sampled.token.token_id in permutation[:4].tolist()


def test_penalties_see_tokens_as_they_are_appended() -> None:
    """With a strong penalty and flat logits no token comes twice before all have come."""
    row = SamplingRow.create(SamplingParams(relative_frequency_penalty=2.0), [0])
    logits = torch.zeros(VOCAB_SIZE)
    for _ in range(VOCAB_SIZE - 1):
        row.token_ids.append(sample_one(logits, row).token.token_id)
    assert sorted(row.token_ids) == list(range(VOCAB_SIZE))


def test_output_penalties_count_the_output_alone_as_openai_s() -> None:
    logits = make_logits(1)[0]
    row = make_row(num_generated_tokens=6, frequency_penalty=0.5, presence_penalty=1.25)
    generated = row.token_ids[row.num_prompt_tokens :]
    scores = logits.clone()
    for token_id in set(generated):
        scores[token_id] -= 0.5 * generated.count(token_id) + 1.25
    sampled = sample_one(logits, row)
    assert sampled.token.token_id == int(scores.argmax())
    assert sampled.token.logprob == pytest.approx(scores.log_softmax(-1).max().item(), abs=1e-6)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_ending_token_is_chosen_before_the_least_number(ignore_eos: bool) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[2, 9, 4]] = torch.tensor([9.0, 8.0, 7.0])
    sampler = Sampler(VOCAB_SIZE, CPU, eos_token_ids=(2,))
    params: dict[str, Any] = {"min_new_tokens": 3, "stop_token_ids": (9,), "ignore_eos": ignore_eos}
    chosen = [
        sampler.sample(logits.unsqueeze(0), [make_row(num_generated_tokens=n, **params)])[0].token.token_id
        for n in range(5)
    ]
    assert chosen == [2 if ignore_eos else 4] * 3 + [2, 2]


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.3, "seed": 1}, {"repetition_penalty": 1.5}, {"top_k": 1}])
def test_raw_logprob_is_the_model_s_own(kind: dict[str, Any]) -> None:
    logits = make_logits(1)[0]
    sampled = sample_one(logits, make_row(num_generated_tokens=3, raw_logprobs=True, **kind))
    own = logits.log_softmax(-1)[sampled.token.token_id].item()
    assert sampled.raw_logprob == pytest.approx(own, abs=1e-6)
    assert sample_one(logits, make_row(**kind)).raw_logprob is None
