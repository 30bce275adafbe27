"""Sampled traces: ids are another generator's, so they are held to their rules. The same seed gives the same tokens, a
token's log-probability is the warped distribution's, and top tokens are the model's own."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.slow

TRACES = (
    "11c_top_n_with_sampling",
    "14a_temperature",
    "14b_top_k",
    "14c_top_p",
    "14d_typical_p",
    "14e_all_warpers",
    "15_do_sample",
    "15b_seed_zero_and_big",
    "16_temperature_without_do_sample",
)
TOLERANCE = 1e-3


def penalized(logits, seen_ids, penalty):
    if penalty in (0.0, 1.0):
        return logits
    ids = torch.tensor(sorted(set(seen_ids)))
    scores = logits[ids]
    logits = logits.clone()
    logits[ids] = torch.where(scores < 0, scores * penalty, scores / penalty)
    return logits


def keep_top_k(logits, k):
    return logits if k == 0 else logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf)


def keep_top_p(logits, top_p):
    """The most likely tokens whose predecessors sum to less than top_p."""
    if top_p == 1.0:
        return logits
    order = logits.argsort(descending=True)
    probabilities = logits[order].softmax(0)
    dropped = order[probabilities.cumsum(0) - probabilities >= top_p]
    return logits.index_fill(0, dropped, -torch.inf)


def keep_typical(logits, mass):
    """Tokens whose surprise is nearest to the entropy, until they sum to `mass` (Meister et al. 2022)."""
    if mass == 1.0:
        return logits
    log_probabilities = logits.log_softmax(0)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities).nansum()
    order = (-log_probabilities - entropy).abs().argsort()
    sums = probabilities[order].cumsum(0)
    dropped = order[sums - probabilities[order] >= mass]
    return logits.index_fill(0, dropped, -torch.inf)


def warped_logprobs(logits, seen_ids, parameters):
    logits = penalized(logits, seen_ids, parameters.repetition_penalty) / parameters.temperature
    logits = keep_top_k(logits, parameters.top_k)
    return keep_typical(keep_top_p(logits, parameters.top_p), parameters.typical_p).log_softmax(0)


@pytest.mark.parametrize("trace", TRACES)
def test_a_seed_fixes_the_tokens_and_logprobs_are_of_the_warped_distribution(golden, logits_after, trace):
    prefill = golden.request_of(golden.load(trace)[0])
    streams, again = golden.run_to_end(prefill), golden.run_to_end(prefill)
    for request in prefill.batch.requests:
        stream = streams[request.id]
        assert stream.ids == again[request.id].ids
        golden.assert_close(stream.logprobs, again[request.id].logprobs)
        assert stream.final.HasField("seed")
        assert stream.final.seed == request.parameters.seed
        assert stream.final.generated_tokens == len(stream.ids)
        prompt_ids = golden.served.tokenizer.encode(request.input_chunks.chunks[0].text)
        for i, logits in enumerate(logits_after(prompt_ids, stream.ids)):
            expected = warped_logprobs(logits, prompt_ids + stream.ids[:i], request.parameters)
            assert stream.logprobs[i] == pytest.approx(expected[stream.ids[i]].item(), abs=TOLERANCE)


@pytest.mark.parametrize("trace", ["15_do_sample", "14a_temperature"])
def test_another_seed_gives_other_tokens_and_a_batch_beside_it_changes_nothing(golden, trace):
    prefill = golden.request_of(golden.load(trace)[0])
    (alone,) = golden.run_to_end(prefill).values()
    other = prefill.batch.requests.add()
    other.CopyFrom(prefill.batch.requests[0])
    other.id, other.parameters.seed = 1, prefill.batch.requests[0].parameters.seed + 1
    together = golden.run_to_end(prefill)
    assert together[0].ids == alone.ids
    assert together[1].ids != alone.ids


def test_top_tokens_are_the_model_s_own_whatever_is_sampled(golden, logits_after):
    prefill = golden.request_of(golden.load("11c_top_n_with_sampling")[0])
    (stream,) = golden.run_to_end(prefill).values()
    prompt_ids = golden.served.tokenizer.encode(prefill.batch.requests[0].input_chunks.chunks[0].text)
    for top, logits in zip(stream.top_tokens, logits_after(prompt_ids, stream.ids), strict=True):
        best = logits.log_softmax(0).topk(3)
        assert list(top.ids) == best.indices.tolist()
        assert list(top.logprobs) == pytest.approx(best.values.tolist(), abs=TOLERANCE)
