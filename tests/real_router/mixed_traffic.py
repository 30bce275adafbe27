"""Clients of every kind at once for a while, and what came of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from .deployment import Deployment
from .probes import ShardConnections
from .reference import Reference
from .request_kinds import KINDS, Ending, RequestKind
from .request_outcomes import check_outcome, send
from .traffic import Client, Stream

NUM_CLIENTS = 24
NUM_PROMPTS = 48
MAX_TOKENS = 160
"""Of most answers."""
LONG_TOKENS = 1300
"""Of an answer in two pieces."""
OK = 200
_HEALTH_INTERVAL_S = 0.1
_PROBE_INTERVAL_S = 0.25
_MEMORY_INTERVAL_S = 30
_MAX_PROMPT_TOKENS = 700
_WORDS = ("apple", "river", "stone", "cloud", "horse", "green", "seven", "moon")


@dataclass
class Summary:
    """What a run did and found. It went well where `faults` is empty."""

    seed: int
    num_shards: int
    duration_s: float = 0
    num_requests: Counter[str] = field(default_factory=Counter)
    """By what the client did."""
    num_refused: Counter[str] = field(default_factory=Counter)
    """Requests that were meant to be refused, by kind."""
    num_compared_tokens: int = 0
    """Equal to transformers'."""
    num_health_checks: int = 0
    num_probes: int = 0
    num_preemptions: float = 0
    num_blocks_left: float = 0
    """In use once all had ended."""
    resident_mib: list[list[int]] = field(default_factory=list)
    """Of each shard's process, from time to time."""
    faults: list[str] = field(default_factory=list)


class MixedTraffic:
    """Runs clients against a deployment until the time is over.

    Args:
        seed: decides what each client does; how the answers interleave is the machine's.
    """

    def __init__(self, deployment: Deployment, reference: Reference, seed: int) -> None:
        self._deployment = deployment
        self._reference = reference
        self._prompts = _make_prompts(random.Random(seed))
        self._expected = {prompt: reference.greedy(prompt, MAX_TOKENS) for prompt in self._prompts}
        self._deadline_s = 0.0
        self.summary = Summary(seed, len(deployment.shard_sockets))

    def run(self, duration_s: float) -> Summary:
        """Returns once all clients have got their last answer and the shards are idle."""
        began_s = time.monotonic()
        self._deadline_s = began_s + duration_s
        asyncio.run(self._run_all())
        summary = self.summary
        summary.duration_s = round(time.monotonic() - began_s, 1)
        try:
            self._deployment.wait_until_idle()
        except AssertionError as error:
            summary.faults.append(str(error))
        ranks = range(summary.num_shards)
        summary.num_blocks_left = sum(self._deployment.metric("pagedkv_cache_blocks", r, state="used") for r in ranks)
        summary.num_preemptions = self._deployment.metric("pagedkv_preemptions_total")
        return summary

    async def _run_all(self) -> None:
        with ShardConnections(self._deployment) as shards:
            async with Client(self._deployment.url) as client:
                clients = [self._be_a_client(client, number) for number in range(NUM_CLIENTS)]
                watchers = [self._check_health(client), self._probe(shards), self._note_memory()]
                await asyncio.gather(*clients, *watchers)

    async def _until_the_end(self, interval_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self._deadline_s:
            await act()
            await asyncio.sleep(interval_s)

    async def _check_health(self, client: Client) -> None:
        async def check() -> None:
            self.summary.num_health_checks += 1
            status = await client.health()
            if status != OK:
                self._fault("/health", f"status {status}")

        await self._until_the_end(_HEALTH_INTERVAL_S, check)

    async def _probe(self, shards: ShardConnections) -> None:
        async def probe() -> None:
            self.summary.num_probes += 1
            try:
                await shards.probe()
            except Exception as error:  # Whatever it is goes into the summary.
                self._fault("probe", repr(error))

        await self._until_the_end(_PROBE_INTERVAL_S, probe)

    async def _note_memory(self) -> None:
        async def note() -> None:
            processes = self._deployment.shard_processes()
            self.summary.resident_mib.append([process.memory_info().rss // 2**20 for process in processes])

        await self._until_the_end(_MEMORY_INTERVAL_S, note)

    async def _be_a_client(self, client: Client, number: int) -> None:
        generator = random.Random(f"{self.summary.seed}/{number}")
        habits: Sequence[tuple[Callable[[Client, random.Random], Awaitable[None]], int]] = (
            (self._stream, 40),
            (self._leave, 20),
            (self._generate, 15),
            (self._send_a_kind, 20),
            (self._ask_for_much, 1),
        )
        actions, weights = zip(*habits, strict=True)
        while time.monotonic() < self._deadline_s:
            (act,) = generator.choices(actions, weights)
            name = act.__name__.strip("_")
            self.summary.num_requests[name] += 1
            try:
                await act(client, generator)
            except Exception as error:  # Whatever it is goes into the summary.
                self._fault(name, repr(error))

    async def _stream(self, client: Client, generator: random.Random) -> None:
        prompt, num_tokens = generator.choice(self._prompts), generator.randint(1, MAX_TOKENS)
        self._compare(await client.stream(prompt, max_new_tokens=num_tokens), num_tokens)

    async def _leave(self, client: Client, generator: random.Random) -> None:
        prompt, leave_after = generator.choice(self._prompts), generator.choice((0, 1, 5, 30))
        stream = await client.stream(prompt, leave_after_tokens=leave_after, max_new_tokens=MAX_TOKENS)
        self._compare(stream, len(stream.token_ids))

    async def _generate(self, client: Client, generator: random.Random) -> None:
        prompt, num_tokens = generator.choice(self._prompts), generator.randint(1, MAX_TOKENS)
        reply = await client.generate(prompt, max_new_tokens=num_tokens)
        assert reply.status == OK, f"{reply}"
        assert tuple(reply.token_ids) == self._expected[prompt][:num_tokens], f"wrong tokens for {prompt[:40]!r}"
        self.summary.num_compared_tokens += len(reply.token_ids)

    async def _ask_for_much(self, client: Client, generator: random.Random) -> None:
        stream = await client.stream(generator.choice(self._prompts[: NUM_PROMPTS // 4]), max_new_tokens=LONG_TOKENS)
        assert stream.error is None, stream.error
        self._compare_beginning(stream, MAX_TOKENS)

    async def _send_a_kind(self, client: Client, generator: random.Random) -> None:
        kind: RequestKind = generator.choice(KINDS)
        if kind.ending is not Ending.ANSWERED:
            self.summary.num_refused[kind.name] += 1
        reply = await send(client, kind)
        try:
            check_outcome(kind, reply, self._reference)
        except AssertionError as error:
            raise AssertionError(f"{kind.name}: {reply} {error}") from error

    def _compare(self, stream: Stream, num_tokens: int) -> None:
        assert stream.error is None, stream.error
        assert tuple(stream.token_ids) == self._expected[stream.prompt][:num_tokens], f"wrong tokens: {stream}"
        self.summary.num_compared_tokens += len(stream.token_ids)

    def _compare_beginning(self, stream: Stream, num_tokens: int) -> None:
        expected = self._expected[stream.prompt]
        assert tuple(stream.token_ids[:num_tokens]) == expected, f"wrong tokens for {stream.prompt[:40]!r}"
        self.summary.num_compared_tokens += num_tokens

    def _fault(self, where: str, what: str) -> None:
        self.summary.faults.append(f"{time.strftime('%H:%M:%S')} {where}: {what[:500]}")


def _make_prompts(generator: random.Random) -> list[str]:
    """Short and long ones; a third begin with the same words."""
    shared = " ".join(generator.choices(_WORDS, k=200))
    prompts = []
    for index in range(NUM_PROMPTS):
        tail = " ".join(generator.choices(_WORDS, k=1 + generator.randrange(_MAX_PROMPT_TOKENS) * index // NUM_PROMPTS))
        prompts.append(f"{shared} {index} {tail}" if index % 3 == 0 else f"{index} {tail}")
    return prompts
