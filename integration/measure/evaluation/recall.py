"""Long-context recall: a fact is hidden in filler text, and a question at the end asks for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedkv.integration.measure.evaluation.paged_run import PagedRun
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import Tokenizer

_FACT = "\n\nThe secret code of the {place} is {code}.\n\n"
_QUESTION = "\n\nQuestion: What is the secret code of the {place}?\nAnswer: The secret code of the {place} is"
_PLACES = ("lighthouse", "library", "harbour", "museum", "station", "castle", "garden", "observatory")
_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RecallTask:
    """Prompts of one length, a fact in each at the same depth, and the tokens that answer."""

    depth: float
    """Position of the fact: 0 is the beginning of the filler, 1 its end."""
    prompts: torch.Tensor
    """[num_facts, num_tokens] int64."""
    answers: torch.Tensor
    """[num_facts, num_answer_tokens] int64."""


def make_recall_tasks(
    filler: str, tokenizer: Tokenizer, num_tokens: int, depths: Sequence[float], num_facts: int, seed: int
) -> list[RecallTask]:
    """Makes tasks with the same facts at every depth.

    Raises:
        ConfigError: the filler is too short.
    """
    generator = random.Random(seed)  # noqa: S311
    facts = [(place, str(generator.randrange(10000, 100000))) for place in _PLACES[:num_facts]]
    filler_ids = tokenizer.encode(filler[: 12 * num_tokens], add_special_tokens=False)
    return [_make_task(filler_ids, tokenizer, num_tokens, depth, facts) for depth in depths]


def _make_task(
    filler_ids: Sequence[int],
    tokenizer: Tokenizer,
    num_tokens: int,
    depth: float,
    facts: Sequence[tuple[str, str]],
) -> RecallTask:
    prompts, answers = [], []
    for place, code in facts:
        fact = tokenizer.encode(_FACT.format(place=place, code=code), add_special_tokens=False)
        question = tokenizer.encode(_QUESTION.format(place=place), add_special_tokens=False)
        room = num_tokens - len(fact) - len(question)
        if not 0 < room <= len(filler_ids):
            raise ConfigError(f"recall over {num_tokens} tokens needs a filler of {room}, found {len(filler_ids)}")
        cut = round(depth * room)
        prompts.append([*filler_ids[:cut], *fact, *filler_ids[cut:room], *question])
        answers.append(tokenizer.encode(f" {code}", add_special_tokens=False))
    num_answer_tokens = min(len(answer) for answer in answers)
    return RecallTask(depth, torch.tensor(prompts), torch.tensor([answer[:num_answer_tokens] for answer in answers]))


def measure_recall(run: PagedRun, task: RecallTask) -> float:
    """Share of facts that greedy decoding answers. Prompts are computed in chunks, answers token by token."""
    num_tokens = task.prompts.shape[1]
    for start in range(0, num_tokens, _CHUNK_TOKENS):
        logits = run.forward(task.prompts[:, start : start + _CHUNK_TOKENS], start, has_all_logits=False)
    is_right = torch.ones(len(task.answers), dtype=torch.bool)
    for place in range(task.answers.shape[1]):
        is_right &= logits[:, -1].argmax(-1).cpu() == task.answers[:, place]
        if place + 1 < task.answers.shape[1]:
            logits = run.forward(task.answers[:, place : place + 1], num_tokens + place)
    return is_right.double().mean().item()
