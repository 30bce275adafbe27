"""Samples tokens from logits, all rows of a step at once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from pagedkv.plugin.requests import SamplingParams, TokenLogprob
from pagedkv.plugin.sampling.chunks import max_rows_at_once
from pagedkv.plugin.sampling.penalties import TokenCounts, penalize_, penalize_output_
from pagedkv.plugin.sampling.top_tokens import find_top_tokens
from pagedkv.plugin.sampling.uniform import uniforms
from pagedkv.plugin.sampling.warpers import divide_by_temperature_, keep_min_p_, keep_top_k_, keep_top_p_, keep_typical_
from pagedkv.plugin.sampling.watermark import Watermark

if TYPE_CHECKING:
    from typing_extensions import Self

_Value = TypeVar("_Value", int, float)

Choice = tuple[torch.Tensor, torch.Tensor]
"""For each row the chosen token id ([num_rows] int64) and its log-probability ([num_rows], float32 or float64)."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The sampler's state of one request, made once and kept until the request ends."""

    params: SamplingParams
    seed: int
    token_ids: list[int]
    """Prompt and generated tokens. The backend's own list, to which it only appends."""
    num_prompt_tokens: int
    token_counts: TokenCounts = field(default_factory=TokenCounts, init=False, repr=False, compare=False)
    """Counts of `token_ids`, up to date after each use of a penalty."""
    output_counts: TokenCounts = field(init=False, repr=False, compare=False)
    """The same of the generated ones alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_counts", TokenCounts(start=self.num_prompt_tokens))

    @classmethod
    def create(cls, params: SamplingParams, token_ids: list[int], fresh_seed: int | None = None) -> Self:
        """Makes the row of a new request, whose `token_ids` are its prompt.

        Its seed is that of `params`, else `fresh_seed`, else a random one."""
        if fresh_seed is None:
            fresh_seed = secrets.randbits(64)
        seed = fresh_seed if params.seed is None else params.seed
        return cls(params=params, seed=seed, token_ids=token_ids, num_prompt_tokens=len(token_ids))

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one row."""

    token: TokenLogprob
    """The chosen token, with its log-probability after watermark, penalties and warpers."""
    top_tokens: tuple[TokenLogprob, ...]
    """The model's best tokens, as many as the request asked for, with ties of the last one; empty if it asked for 0."""
    raw_logprob: float | None = None
    """The model's own log-probability of the token, if the request asked for it."""


class Sampler:
    """Chooses the next token of each row by its request's parameters.

    A row's token depends only on its logits, its seed and the number of its generated tokens. So other rows of the step
    do not matter, and a request that was preempted and recomputed continues as it would have. A row of NaN or infinite
    logits gets some token with a log-probability of NaN and does not affect other rows.

    Args:
        vocab_size: width of the logits.
        device: where the logits lie.
        eos_token_ids: end a request, so that `min_new_tokens` keeps them back.
        watermark_gamma: part of the vocabulary that a watermark favours.
        watermark_delta: by how much it raises the scores of that part.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
        *,
        watermark_gamma: float = 0.5,
        watermark_delta: float = 2.0,
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._device = device
        self._watermark = Watermark(vocab_size, watermark_gamma, watermark_delta)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Chooses one token for each row. Does not change the logits or the rows' tokens.

        Args:
            logits: [num_rows, vocab_size], any float dtype.
            rows: [num_rows].
        """
        assert logits.shape == (len(rows), self._vocab_size)
        # Copy ids and log-probabilities from the device at once; a double holds both exactly.
        chosen = torch.empty(2, len(rows), dtype=torch.float64, device=self._device)
        for choose, indices in self._group(rows):
            for part in self._split(indices):
                ids, logprobs = choose(_select(logits, part), [rows[i] for i in part])
                chosen[:, part] = torch.stack([ids.double(), logprobs.double()])
        top_tokens = self._top_tokens(logits, rows)
        raw_logprobs = self._raw_logprobs(logits, rows, chosen[0])
        ids_and_logprobs = zip(*chosen.tolist(), strict=True)
        return [
            SampledToken(TokenLogprob(int(token_id), logprob), top_tokens.get(i, ()), raw_logprobs.get(i))
            for i, (token_id, logprob) in enumerate(ids_and_logprobs)
        ]

    def _group(
        self, rows: Sequence[SamplingRow]
    ) -> list[tuple[Callable[[torch.Tensor, Sequence[SamplingRow]], Choice], list[int]]]:
        """Groups row indices by the way in which their tokens are chosen."""
        greedy: list[int] = []
        adjusted: list[int] = []
        sampled: list[int] = []
        for i, row in enumerate(rows):
            if row.params.is_sampled:
                sampled.append(i)
            elif row.params.watermark or _has_penalty(row.params) or _must_go_on(row):
                adjusted.append(i)
            else:
                greedy.append(i)
        return [(self._choose_best, greedy), (self._choose_adjusted, adjusted), (self._choose_sampled, sampled)]

    def _split(self, indices: list[int]) -> Iterator[list[int]]:
        num_rows = max_rows_at_once(self._vocab_size, self._device)
        for start in range(0, len(indices), num_rows):
            yield indices[start : start + num_rows]

    def _choose_best(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Choice:
        return _best_tokens(logits.float())

    def _choose_adjusted(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Choice:
        return _best_tokens(self._adjust(logits, rows))

    def _choose_sampled(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Choice:
        scores = self._adjust(logits, rows)
        params = [row.params for row in rows]
        divide_by_temperature_(scores, [p.temperature for p in params])
        _warp_(scores, keep_min_p_, {i: p.min_p for i, p in enumerate(params) if p.min_p})
        _warp_(scores, keep_top_k_, {i: p.top_k for i, p in enumerate(params) if p.top_k})
        _warp_(scores, keep_top_p_, {i: p.top_p for i, p in enumerate(params) if p.top_p < 1})
        _warp_(scores, keep_typical_, {i: p.typical_p for i, p in enumerate(params) if p.typical_p < 1})
        draws = uniforms([row.seed for row in rows], [row.num_generated_tokens for row in rows])
        return _draw_tokens(scores, torch.from_numpy(draws).to(self._device))

    def _adjust(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Returns a float32 copy of the logits with watermark and penalties."""
        scores = logits.to(torch.float32, copy=True)
        marked = [i for i, row in enumerate(rows) if row.params.watermark]
        if marked:
            self._watermark.favour_(scores, marked, [rows[i].token_ids[-1] for i in marked])
        penalized = [i for i, row in enumerate(rows) if _has_prompt_penalty(row.params)]
        if penalized:
            for i in penalized:
                rows[i].token_counts.update(rows[i].token_ids)
            penalize_(
                scores,
                penalized,
                [rows[i].token_counts for i in penalized],
                [rows[i].params.repetition_penalty for i in penalized],
                [rows[i].params.relative_frequency_penalty for i in penalized],
            )
        penalized = [i for i, row in enumerate(rows) if _has_output_penalty(row.params)]
        if penalized:
            for i in penalized:
                rows[i].output_counts.update(rows[i].token_ids)
            penalize_output_(
                scores,
                penalized,
                [rows[i].output_counts for i in penalized],
                [rows[i].params.frequency_penalty for i in penalized],
                [rows[i].params.presence_penalty for i in penalized],
            )
        for i, row in enumerate(rows):
            if _must_go_on(row):
                scores[i, self._ending_ids(row.params)] = -torch.inf
        return scores

    def _ending_ids(self, params: SamplingParams) -> list[int]:
        ending = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._eos_token_ids)
        return [token_id for token_id in ending if token_id < self._vocab_size]

    def _raw_logprobs(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], chosen_ids: torch.Tensor
    ) -> dict[int, float]:
        wanted = [i for i, row in enumerate(rows) if row.params.raw_logprobs]
        found: dict[int, float] = {}
        for part in self._split(wanted):
            logprobs = _select(logits, part).log_softmax(-1, dtype=torch.float32)
            of_chosen = logprobs.gather(-1, chosen_ids[part].long().unsqueeze(-1)).squeeze(-1)
            found.update(zip(part, of_chosen.tolist(), strict=True))
        return found

    def _top_tokens(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> dict[int, tuple[TokenLogprob, ...]]:
        wanted = [i for i, row in enumerate(rows) if row.params.top_n_tokens]
        found: dict[int, tuple[TokenLogprob, ...]] = {}
        for part in self._split(wanted):
            best = find_top_tokens(_select(logits, part), [rows[i].params.top_n_tokens for i in part])
            found.update(zip(part, best, strict=True))
        return found


def _has_penalty(params: SamplingParams) -> bool:
    return _has_prompt_penalty(params) or _has_output_penalty(params)


def _has_prompt_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.relative_frequency_penalty != 0.0


def _has_output_penalty(params: SamplingParams) -> bool:
    return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _must_go_on(row: SamplingRow) -> bool:
    return row.num_generated_tokens < row.params.min_new_tokens


def _select(logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Selects rows by ascending indices; returns a view if they are contiguous."""
    start, end = indices[0], indices[-1] + 1
    if end - start == len(indices):
        return logits[start:end]
    return logits[indices]


def _warp_(
    scores: torch.Tensor, warper_: Callable[[torch.Tensor, Sequence[_Value]], None], values: dict[int, _Value]
) -> None:
    """Runs a warper in place over the rows that have a value for it."""
    if len(values) == len(scores):
        warper_(scores, list(values.values()))
    elif values:
        indices = list(values)
        part = scores[indices]
        warper_(part, list(values.values()))
        scores[indices] = part


def _best_tokens(scores: torch.Tensor) -> Choice:
    """The best token of each row (the first of several) and its log-softmax; scores: [num_rows, vocab_size] float32."""
    ids = scores.argmax(-1, keepdim=True)
    return ids.squeeze(-1), scores.log_softmax(-1).gather(-1, ids).squeeze(-1)


def _draw_tokens(scores: torch.Tensor, draws: torch.Tensor) -> Choice:
    """Draws by inverting the cumulative distribution.

    Args:
        scores: [num_rows, vocab_size] float32; −inf is never drawn.
        draws: [num_rows] float64 in [0, 1).

    Returns:
        The tokens and their log-softmax.
    """
    best = scores.amax(-1, keepdim=True)
    sums = (scores - best).exp_().cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    # To the right of equal sums: so a token of probability 0 is never drawn. A row of NaN gives an index past the end.
    ids = torch.searchsorted(sums, draws.unsqueeze(-1) * total, right=True).clamp_(max=scores.shape[-1] - 1)
    logprobs = (scores.gather(-1, ids) - best).double() - total.log()
    return ids.squeeze(-1), logprobs.squeeze(-1)
