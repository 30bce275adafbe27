"""Traces that are right as they were recorded: the same ids, texts, reasons, and log-probabilities within 1e-3."""

from __future__ import annotations

import pytest

TRACES = (
    "01_greedy_single",
    "02_greedy_batch4",
    "03_concat",
    "04_filter_batch",
    "06a_stop_single_token",
    "06b_stop_multi_token",
    "06c_stop_spans_two_tokens",
    "06e_stop_with_length_same_step",
    "06f_stop_empty_string",
    "06g_stop_newline_and_special",
    "06h_stop_in_prompt_overlap",
    "07a_eos",
    "07b_ignore_eos",
    "07c_eos_at_limit",
    "07e_batch_eos_mixed",
    "08_max_new_tokens_1",
    "08b_max_new_tokens_mixed",
    "09_truncate",
    "10_prefill_logprobs",
    "11_top_n_tokens",
    "12_repetition_penalty",
    "12c_repetition_penalty_below_1",
    "14g_top_k_1",
    "17_watermark",
    "18b_emoji_chat",
    "18d_devanagari",
    "18g_short_prompt",
    "18i_short_prompt_multibyte_batch",
    "19_add_special_tokens",
    "20a_inputs_vs_chunks",
    "21e2_wrong_size_big",
    "21e_wrong_size",
    "21f5_repetition_penalty_zero",
)


@pytest.mark.parametrize("trace", TRACES)
def test_a_trace_is_answered_as_it_was_recorded(golden, trace):
    ended: set[int] = set()
    for call in golden.load(trace):
        found, recorded = golden.send(call), golden.recorded_answer(call)
        if call["method"] in ("Prefill", "Decode"):
            assert [g.request_id for g in found.generations] == [g.request_id for g in recorded.generations]
            for ours, theirs in zip(found.generations, recorded.generations, strict=True):
                golden.assert_same_generation(theirs, ours)
            ended |= {g.request_id for g in recorded.generations if g.HasField("generated_text")}
            assert found.HasField("batch") == recorded.HasField("batch")
        # The recorded server counts requests that have ended until they are filtered out.
        live = [request_id for request_id in recorded.batch.request_ids if request_id not in ended]
        assert found.batch.id == recorded.batch.id
        assert list(found.batch.request_ids) == live
        assert found.batch.size == len(live)
