"""The rules that hold for every call of the real router, by name, and the tally of a check.

A server may count on them, and a double that breaks one is no double.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

RULES = {
    # Start
    "start-order": "ServiceDiscovery of the first shard; ClearCache without id, Info, Warmup of all; nothing before.",
    "warm-up-batch": "Requests of id 0 without blocks, `_test ` again and again, that fill max_prefill_tokens.",
    "warm-up-limits": "Warmup carries the lengths of the flags; lengths that were given are repeated by the answer.",
    # The batching loop
    "every-shard": "Each call of the loop goes to every shard, with the same content, in the same order.",
    "one-at-a-time": "The loop's next call begins when all shards have answered the one before.",
    "batch-ids": "Batch ids are 0, 1, 2, …",
    "request-ids": "Request ids ascend from batch to batch: none comes twice.",
    "cached-batch": "Prefill passes the running batch along, as last answered, if and only if chunking is supported.",
    "decode-batches": "Decode names the running batch as last answered, and without chunking the new one behind it.",
    "decode-after-mixed": "After a Prefill beside a running batch comes a Decode.",
    "filter-after-answer": "FilterBatch names the batch of the answer just got, and some of its live requests.",
    "filter-if-sizes-differ": "FilterBatch comes where the answer's size is not the number of live requests, else not.",
    "clear-where-none-lives": "ClearCache with id follows an answer of whose batch nobody lives, or an error.",
    "gone-at-generation": "Who is left out of FilterBatch, without having ended, had a generation in that answer.",
    "error-clears": "A failed Prefill is followed by ClearCache of the new batch alone, a Decode of each named one.",
    "error-drops-all": "No batch and no request of a failed call is named again, but by these ClearCaches.",
    # Admission
    "batch-size": "size is the number of requests, at least 1.",
    "batch-max-tokens": "max_tokens is the number of uncached prompt tokens of those requests that are not chunked.",
    "batch-max-blocks": "max_blocks is that of the request with the most.",
    "request-tokens": "slots: prompt + max_new_tokens + speculate − 1 (prompt: 1 to max_input_tokens, truncate).",
    "slots-from-blocks": "Slots are those of the blocks in order, cut behind the last token; no block is without one.",
    "block-zero": "Blocks are 1 to N − 1, each once in a request; block 0 is for probes.",
    "blocks-disjoint": "Beyond the cached prefix a request's blocks are in no other live request.",
    "blocks-in-all": "Live requests hold N − 1 blocks at most.",
    "prefix-not-live": "A cached prefix holds no block that a live request has beyond its own cached prefix.",
    "prefix-length": "cache_len is whole blocks, or all of the prompt but one token; 0 without prefix caching.",
    "no-prefix-with-logprobs": "A request with prompt log-probabilities has cache_len 0.",
    "prefill-budget": "Uncached prompt tokens: at most max_batch_prefill_tokens − current_tokens, in blocks.",
    "chunk-fills-budget": "chunk_len: the last request alone, less than its uncached prompt, exactly what is left.",
    # Requests
    "max-new-tokens": "1 to 1024, and with the prompt at most max_total_tokens.",
    "text": "inputs is not empty, and is what the chunks say; truncate is 1 to max_input_tokens.",
    "parameters": "temperature and repetition_penalty above 0 (or inf), top_p and typical_p in (0, 1], …",
    "never-ignore-eos": "ignore_eos_token is false, whatever the client asked for.",
    "grammar": "Grammars are regexes: never JSON, and never empty with a type.",
    "adapter-from-model": "adapter_id is a client's adapter_id, or its OpenAI model, unless that is `tgi`.",
    "piece-again": "A seed that comes again is a next piece: prompt and generated text, after an end by length.",
    # Health
    "probe-content": "A health Prefill: ids 2^64 − 1, text `liveness`, one new token, blocks [0], no running batch.",
    "probe-forgotten": "Nothing but a health Prefill names the id 2^64 − 1.",
    "probe-after-failure": "A health Prefill comes only after a failure since the last one that went well.",
    "probe-until-well": "After a failed health check comes a health Prefill, unless checks overlap.",
}


@dataclass(frozen=True)
class Violation:
    rule: str
    at_ms: float
    method: str
    text: str


@dataclass
class Tally:
    """How often each rule could have been broken, and where it was."""

    num_checks: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def check(self, rule: str, is_kept: bool, at_ms: float, method: str, text: object = "") -> None:
        """Counts a check of a rule, which must be one of RULES."""
        assert rule in RULES, rule
        self.num_checks[rule] += 1
        if not is_kept:
            self.violations.append(Violation(rule, at_ms, method, str(text)))
