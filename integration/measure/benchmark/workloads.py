"""Workloads: shapes of requests and their token ids, which are the same for every engine.

>>> workload = draw_workload(SHAPES["prefix"], Arrivals(), plain_tokens=range(100, 1000), seed=0, repetition=0)
>>> len(workload), {len(request.prompt_ids) for request in workload}, workload[0].max_new_tokens
(32, {1088}, 32)
>>> workload[0].prompt_ids[:1024] == workload[31].prompt_ids[:1024]
True
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagedkv.integration.measure.benchmark.runners.protocol import RunRequest
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import Tokenizer

NUM_PLAIN_TOKENS = 2048
_MAX_TRIES = 64
"""Tries for each plain token wanted."""
_WARMUP_NEW_TOKENS = 16
_WARMUP_REQUESTS = 4
"""Warm-up requests of each workload."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Number and lengths of requests. If there are several lengths, each is drawn with the same probability."""

    name: str
    num_requests: int
    prompt_tokens: tuple[int, ...]
    """Lengths of prompts, without the shared prefix."""
    new_tokens: tuple[int, ...]
    shared_tokens: int = 0
    """Length of a prefix that all prompts share."""
    needs_small_cache: bool = False
    """Runs on backends of their own, whose KV budget lets the contiguous one hold CAPACITY_ROWS requests."""

    @property
    def max_total_tokens(self) -> int:
        return self.shared_tokens + max(self.prompt_tokens) + max(self.new_tokens)

    def describe(self) -> str:
        shared = f"{self.shared_tokens} shared + " if self.shared_tokens else ""
        return f"{self.num_requests} × ({shared}{_join(self.prompt_tokens)} → {_join(self.new_tokens)})"

    def scaled(self, factor: float) -> Shape:
        """Returns the shape with prompts and answers `factor` times as long, at least one token each."""
        return replace(
            self,
            prompt_tokens=tuple(_scale(length, factor) for length in self.prompt_tokens),
            new_tokens=tuple(_scale(length, factor) for length in self.new_tokens),
            shared_tokens=_scale(self.shared_tokens, factor) if self.shared_tokens else 0,
        )


CAPACITY_ROWS = 8
CAPACITY_ROW_TOKENS = 2048
"""Tokens that the contiguous backend reserves for a request of the workload `capacity`."""

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("short", 32, (128,), (64,)),
        Shape("long", 8, (2048,), (64,)),
        Shape("mixed", 32, (32, 128, 512, 1024), (16, 64, 128)),
        Shape("prefix", 32, (64,), (32,), shared_tokens=1024),
        Shape("ctx", 8, (3072,), (128,)),
        Shape("stream-128", 1, (128,), (64,)),
        Shape("stream-3072", 1, (3072,), (64,)),
        Shape("capacity", 64, (128,), (128,), needs_small_cache=True),
    )
}
GROUPS = {"stream": ("stream-128", "stream-3072"), "all": tuple(SHAPES)}
"""Names of several workloads together."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival times of requests: all at once, or `rate` a second on average, one or `burst_size` at a time."""

    rate: float | None = None
    """Requests a second; gaps between arrivals are exponential (a Poisson process), bursts are regular."""
    burst_size: int = 0
    """Requests of a burst; 0 is no bursts."""

    def draw(self, num_requests: int, random_: random.Random) -> list[float]:
        """Draws arrival times in seconds after the start, ascending. The first is 0."""
        if self.rate is None:
            return [0.0] * num_requests
        if self.burst_size:
            return [index // self.burst_size * self.burst_size / self.rate for index in range(num_requests)]
        times = [0.0]
        while len(times) < num_requests:
            times.append(times[-1] + random_.expovariate(self.rate))
        return times

    def describe(self) -> str:
        if self.rate is None:
            return "all at once"
        if self.burst_size:
            return f"bursts of {self.burst_size}, {self.rate:g} requests/s"
        return f"Poisson, {self.rate:g} requests/s"


ALL_AT_ONCE = Arrivals()


def select_shapes(names: Sequence[str], scale: float = 1.0) -> list[Shape]:
    """Returns shapes by name, in the given order.

    Raises:
        ConfigError: a name is unknown.
    """
    known = [name for group in names for name in GROUPS.get(group, (group,))]
    unknown = [name for name in known if name not in SHAPES]
    if unknown:
        raise ConfigError(f"there is no workload {unknown[0]!r}; take some of {', '.join([*SHAPES, *GROUPS])}")
    return [SHAPES[name].scaled(scale) for name in dict.fromkeys(known)]


def draw_plain_tokens(tokenizer: Tokenizer, vocab_size: int, seed: int) -> list[int]:
    """Draws token ids that are the same after decoding and tokenizing again: each is a space and a word.

    Requests through gRPC are text, so prompts are made of these. If the tokenizer has few such words, any ids below
    `vocab_size` are used; `to_text` then detects prompts that can't be text.
    """
    random_ = random.Random(seed)  # noqa: S311 # token ids for a benchmark
    num_tokens = min(NUM_PLAIN_TOKENS, vocab_size // 8)
    found: dict[int, None] = {}
    for _ in range(_MAX_TRIES * num_tokens):
        token_id = random_.randrange(vocab_size)
        if _is_plain(tokenizer, token_id):
            found[token_id] = None
        if len(found) == num_tokens:
            return list(found)
    return list(found) if len(found) >= num_tokens // 2 > 0 else list(range(vocab_size))


def to_text(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """Returns the text that has these tokens. Raises ConfigError if there is none."""
    text = tokenizer.decode(prompt_ids)
    if tokenizer.encode(text, add_special_tokens=False) != list(prompt_ids):
        raise ConfigError("this tokenizer has no text for the drawn token ids; leave out --through tgi")
    return text


def draw_workload(
    shape: Shape, arrivals: Arrivals, plain_tokens: Sequence[int], seed: int, repetition: int
) -> list[RunRequest]:
    """Draws the requests of one repetition. No two repetitions share a prompt, so that caches have no effect."""
    random_ = random.Random(_mix(seed, shape.name, repetition))  # noqa: S311
    shared = random_.choices(plain_tokens, k=shape.shared_tokens)
    lengths = _draw_lengths(shape, random_)
    return [
        RunRequest(shared + random_.choices(plain_tokens, k=num_prompt_tokens), num_new_tokens, arrival_s)
        for (num_prompt_tokens, num_new_tokens), arrival_s in zip(
            lengths, arrivals.draw(shape.num_requests, random_), strict=True
        )
    ]


def draw_warmup(shapes: Sequence[Shape], plain_tokens: Sequence[int], seed: int) -> list[RunRequest]:
    """Draws a few requests of each shape with short answers, all at once, that no repetition has."""
    requests = [draw_workload(shape, ALL_AT_ONCE, plain_tokens, seed, -1)[:_WARMUP_REQUESTS] for shape in shapes]
    return [
        replace(request, max_new_tokens=min(request.max_new_tokens, _WARMUP_NEW_TOKENS))
        for of_shape in requests
        for request in of_shape
    ]


def _draw_lengths(shape: Shape, random_: random.Random) -> list[tuple[int, int]]:
    """Draws prompt and new tokens of each request. They are equal in every repetition, so totals are equal too."""
    lengths = random.Random(_mix(0, shape.name, 0))  # noqa: S311
    return [(lengths.choice(shape.prompt_tokens), lengths.choice(shape.new_tokens)) for _ in range(shape.num_requests)]


def _is_plain(tokenizer: Tokenizer, token_id: int) -> bool:
    text = tokenizer.decode([token_id, token_id])
    word = text.split()[0] if text.strip() else ""
    is_word = word.isascii() and word.isalpha() and word.islower()
    return is_word and text == f" {word} {word}" and tokenizer.encode(text, add_special_tokens=False) == [token_id] * 2


def _mix(seed: int, name: str, repetition: int) -> int:
    """Combines several values into a seed. Python's own hash of a string differs between processes."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name} {repetition}".encode()).digest()[:8], "big")


def _scale(length: int, factor: float) -> int:
    return max(1, round(length * factor))


def _join(lengths: tuple[int, ...]) -> str:
    return "|".join(map(str, lengths))
