"""Teacher-forced accuracy of KV dtypes, measured through the paged cache on the same paths as serving.

Each sequence has two halves: the first is computed in chunks, like a prompt, the second token by token, like an answer.
The unquantized run and those of all KV dtypes compute each batch one after the other, so that distributions are
compared at once and not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pagedkv.integration.measure.evaluation.measures import Accuracy, AccuracySums
from pagedkv.integration.measure.evaluation.paged_run import PagedRun

MakeRun = Callable[[str, int, int], PagedRun]
"""Makes a run of a KV dtype from (name, num_rows, max_tokens)."""


@dataclass(frozen=True, slots=True)
class PathSums:
    chunked: AccuracySums = field(default_factory=AccuracySums)
    decode: AccuracySums = field(default_factory=AccuracySums)

    def total(self) -> Accuracy:
        return self.chunked.merge(self.decode).means()


def measure_accuracy(
    make_run: MakeRun,
    unquantized: str,
    kv_dtypes: Sequence[str],
    sequences: Sequence[Sequence[int]],
    *,
    chunk_tokens: int,
    max_batch_size: int,
    on_tokens: Callable[[int], object],
) -> dict[str, PathSums]:
    """Runs sequences of equal length.

    Args:
        unquantized: name of the KV dtype with which all others are compared.
        chunk_tokens: tokens of a chunk of the first half.
        max_batch_size: sequences computed at the same time.
        on_tokens: called with the number of tokens that were computed.
    """
    sums = {name: PathSums() for name in kv_dtypes}
    for first in range(0, len(sequences), max_batch_size):
        ids = torch.tensor(sequences[first : first + max_batch_size])
        base = make_run(unquantized, *ids.shape)
        runs = {name: make_run(name, *ids.shape) for name in kv_dtypes if name != unquantized}
        for start, end in _steps(ids.shape[1], chunk_tokens):
            path = "chunked" if end - start > 1 else "decode"
            step_sums = {name: getattr(sums[name], path) for name in kv_dtypes}
            _compare_step(base, runs, step_sums, ids, start, end)
            on_tokens((end - start) * len(ids))
    return sums


def _steps(num_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """Yields start and end of each step. The last token is left out: it has no next token to predict."""
    half = num_tokens // 2
    for start in range(0, half, chunk_tokens):
        yield start, min(start + chunk_tokens, half)
    for start in range(half, num_tokens - 1):
        yield start, start + 1


def _compare_step(
    base: PagedRun,
    runs: Mapping[str, PagedRun],
    sums: Mapping[str, AccuracySums],
    ids: torch.Tensor,
    start: int,
    end: int,
) -> None:
    next_ids = ids[:, start + 1 : end + 1].flatten()
    expected = base.forward(ids[:, start:end], start).flatten(0, 1).log_softmax(-1)
    next_ids = next_ids.to(expected.device)
    for name, step_sums in sums.items():
        found = expected
        if name in runs:
            found = runs[name].forward(ids[:, start:end], start).flatten(0, 1).log_softmax(-1)
        step_sums.add(expected, found, next_ids)


def generate_greedily(
    run: PagedRun, prompts: torch.Tensor, num_tokens: int, on_tokens: Callable[[int], object]
) -> torch.Tensor:
    """Decodes greedily after prompts: [num_rows, num_prompt_tokens] int64. Returns [num_rows, num_tokens]."""
    logits = run.forward(prompts, 0, has_all_logits=False)
    tokens = [logits[:, -1].argmax(-1, keepdim=True)]
    for place in range(num_tokens - 1):
        tokens.append(run.forward(tokens[-1], prompts.shape[1] + place)[:, -1].argmax(-1, keepdim=True))
        on_tokens(len(prompts))
    return torch.cat(tokens, 1).cpu()


def share_equal(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of equal tokens at the same position: [num_rows, num_tokens] twice."""
    return (one == other).double().mean().item()
