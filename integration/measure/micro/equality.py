"""Whether every way to run a prompt gives the same tokens: paged, contiguous and transformers' own generate.

    python integration/measure/micro/equality.py [--model DIR] [--num-prompts 40] [--max-prompt-tokens 600]
                                         [--max-new-tokens 64] [--json]

Greedy, float32, all prompts at once. The paged cache runs with room for all, with a tenth of the need, in chunks of 64
tokens, and behind gRPC in a router's order of calls. Exit code 1 where any token differs.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from transformers import AutoModelForCausalLM

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.client import KEEP_ALL_TOKENS
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.integration.demo_model import ensure_demo_model
from pagedkv.integration.serve.child_process import child_server
from pagedkv.plugin import Engine, SamplingParams
from pagedkv.plugin.interface import Tokenizer

BLOCK_SIZE = 16

Runner = Callable[[], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Workload:
    model: Path
    prompts: Sequence[str]
    prompt_ids: Sequence[Sequence[int]]
    max_new_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all sequences at the same time."""
        return sum(-(-(len(ids) + self.max_new_tokens) // BLOCK_SIZE) for ids in self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    num_equal: int
    """Prompts whose tokens are those of the reference."""
    num_prompts: int
    seconds: float
    preemptions: int | None = None

    @property
    def is_equal(self) -> bool:
        return self.num_equal == self.num_prompts


def make_prompts(tokenizer: Tokenizer, num_prompts: int, max_prompt_tokens: int) -> tuple[list[str], list[list[int]]]:
    """Pieces of Python's documentation, 1 to max_prompt_tokens tokens, both lengths among them."""
    random_ = random.Random(0)  # noqa: S311 # lengths for a benchmark
    topics = list(pydoc_data.topics.topics.values())
    lengths = [1, max_prompt_tokens] + [random_.randint(1, max_prompt_tokens) for _ in range(num_prompts - 2)]
    texts = []
    for index, length in enumerate(lengths[:num_prompts]):
        token_ids = tokenizer.encode("".join(topics[index : index + 20]))[:length]
        texts.append(tokenizer.decode(token_ids))
    return texts, [tokenizer.encode(text) for text in texts]


def run_transformers(work: Workload) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in work.prompt_ids:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=work.max_new_tokens, do_sample=False
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def run_engine(work: Workload, backend: str, settings: Mapping[str, Any], preemptions: list[int]) -> list[list[int]]:
    config = {"model.dtype": "float32", "cache.block_size": BLOCK_SIZE, **settings}
    with Engine(work.model, backend, config) as engine:
        results = engine.generate(work.prompts, SamplingParams(max_new_tokens=work.max_new_tokens, ignore_eos=True))
        preemptions.append(engine.stats().preemptions)
    return [result.token_ids for result in results]


def run_grpc(work: Workload) -> list[list[int]]:
    """One Prefill with every prompt, then Decode until the answer has no batch."""
    settings = {"model.dtype": "float32", "cache.num_blocks": work.num_blocks}
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory(prefix="pagedkv-") as folder:
        arguments = [str(work.model), "--uds-path", f"{folder}/socket", *flags]
        with (
            child_server(arguments, Path(folder, "log")) as server,
            grpc.insecure_channel(server.target) as channel,
        ):
            return _drive(TextGenerationServiceStub(channel), work)


def _drive(stub: Any, work: Workload) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in work.prompts]
    requests = [
        pb.Request(
            id=index,
            inputs=prompt,
            truncate=KEEP_ALL_TOKENS,
            add_special_tokens=True,
            parameters=pb.NextTokenChooserParameters(temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0),
            stopping_parameters=pb.StoppingCriteriaParameters(
                max_new_tokens=work.max_new_tokens, ignore_eos_token=True
            ),
        )
        for index, prompt in enumerate(work.prompts)
    ]
    response = stub.Prefill(pb.PrefillRequest(batch=pb.Batch(id=0, requests=requests, size=len(requests))))
    while True:
        for generation in response.generations:
            outputs[generation.request_id] += generation.tokens.ids
        if not response.HasField("batch"):
            return outputs
        response = stub.Decode(pb.DecodeRequest(batches=[response.batch]))


def compare(work: Workload, report: Callable[[Outcome], None]) -> list[Outcome]:
    preemptions: list[int] = []
    whole = {"cache.num_blocks": work.num_blocks}
    tenth = {"cache.num_blocks": max(work.num_blocks // 10, -(-(max(map(len, work.prompt_ids)) + 64) // BLOCK_SIZE))}
    contiguous = {"cache.num_blocks": work.num_blocks * 4, "limits.max_total_tokens": 1024}
    runners: dict[str, Runner] = {
        "paged": lambda: run_engine(work, "paged", whole, preemptions),
        "paged, a tenth of the need": lambda: run_engine(work, "paged", tenth, preemptions),
        "paged, chunks of 64": lambda: run_engine(
            work, "paged", whole | {"scheduler.max_step_tokens": 64}, preemptions
        ),
        "contiguous": lambda: run_engine(work, "contiguous", contiguous, preemptions),
        "paged, through gRPC": lambda: run_grpc(work),
    }
    started_s = time.perf_counter()
    reference = run_transformers(work)
    outcomes = [Outcome("transformers generate", len(reference), len(reference), time.perf_counter() - started_s)]
    report(outcomes[0])
    for name, runner in runners.items():
        preemptions.clear()
        started_s = time.perf_counter()
        tokens = runner()
        num_equal = sum(mine == wanted for mine, wanted in zip(tokens, reference, strict=True))
        seconds = time.perf_counter() - started_s
        outcomes.append(Outcome(name, num_equal, len(reference), seconds, *preemptions[-1:]))
        report(outcomes[-1])
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory instead of the demo model")
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-prompt-tokens", type=int, default=600)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = options.model or ensure_demo_model()
    with Engine(model, config={"cache.num_blocks": 8}) as engine:
        prompts, prompt_ids = make_prompts(engine.tokenizer, options.num_prompts, options.max_prompt_tokens)
    work = Workload(model, prompts, prompt_ids, options.max_new_tokens)

    def report(outcome: Outcome) -> None:
        suffix = "" if outcome.preemptions is None else f", {outcome.preemptions} preemptions"
        line = f"{outcome.name}: {outcome.num_equal} of {outcome.num_prompts} equal, {outcome.seconds:.1f} s{suffix}"
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    outcomes = compare(work, report)
    if options.json:
        print(json.dumps({outcome.name: [outcome.num_equal, outcome.num_prompts] for outcome in outcomes}))
    return 0 if all(outcome.is_equal for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
