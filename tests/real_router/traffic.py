"""Clients of the router: requests and streams over HTTP, clients that go away, and requests beside running streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar

import httpx2

TIMEOUT_S = 300
NUM_HEALTH_CHECKS = 3
_NUM_TOKENS_TO_BEGIN = 3
_POLL_S = 0.005

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request that does not stream."""

    status: int
    body: Any

    @property
    def token_ids(self) -> list[int]:
        return [token["id"] for token in self.body["details"]["tokens"]]

    @property
    def finish_reason(self) -> str:
        return str(self.body["details"]["finish_reason"])


@dataclass(slots=True)
class Stream:
    """One streamed answer as it comes."""

    prompt: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    """Of the tokens that are not special, as they came."""
    generated_text: str | None = None
    """The whole text, as the last event tells it."""
    finish_reason: str | None = None
    num_generated_tokens: int | None = None
    """As the last event tells it."""
    error: str | None = None
    has_left: bool = False
    """Its client went away before the end."""

    @property
    def has_ended(self) -> bool:
        return self.has_left or self.error is not None or self.generated_text is not None

    def take(self, event: dict[str, Any]) -> None:
        """Raises AssertionError where a token is missing or comes twice."""
        assert self.generated_text is None, f"an event after the last one: {event}"
        if "error" in event:
            self.error = event["error"]
            return
        self.token_ids.append(event["token"]["id"])
        assert event["index"] == len(self.token_ids)
        if not event["token"]["special"]:
            self.text += event["token"]["text"]
        if event["generated_text"] is not None:
            self.generated_text = event["generated_text"]
            self.finish_reason = event["details"]["finish_reason"]
            self.num_generated_tokens = event["details"]["generated_tokens"]


class Client:
    """Any number of clients of one router, in one event loop: `async with Client(url) as client`."""

    def __init__(self, url: str) -> None:
        self._http = httpx2.AsyncClient(
            base_url=url,
            timeout=TIMEOUT_S,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
            verify=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Any) -> Reply:
        response = await self._http.post(path, json=body)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return Reply(response.status_code, response.json() if is_json else response.text)

    async def generate(self, prompt: str, **parameters: Any) -> Reply:
        """Greedy unless parameters say otherwise, with details."""
        return await self.post("/generate", {"inputs": prompt, "parameters": {"details": True, **parameters}})

    async def chat(self, content: str, **body: Any) -> Reply:
        """Greedy unless the body says otherwise."""
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, "temperature": 0.0, **body})

    async def health(self) -> int:
        """The status of `/health`."""
        return (await self._http.get("/health")).status_code

    async def get(self, path: str) -> Reply:
        response = await self._http.get(path)
        return Reply(response.status_code, response.json())

    async def stream(
        self, prompt: str, *, leave_after_tokens: int | None = None, into: Stream | None = None, **parameters: Any
    ) -> Stream:
        """Streams one answer to its end, or until its client goes away.

        Args:
            leave_after_tokens: when the client goes away; 0 is at once, before an answer.
            into: filled as the tokens come.
        """
        stream = Stream(prompt) if into is None else into
        body = {"inputs": prompt, "parameters": {"details": True, **parameters}}
        async with self._http.stream("POST", "/generate_stream", json=body) as response:
            if response.status_code != httpx2.codes.OK:
                stream.error = (await response.aread()).decode()
                return stream
            if leave_after_tokens == 0:
                stream.has_left = True
                return stream
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    stream.take(json.loads(line.removeprefix("data:")))
                if stream.has_ended:
                    break
                if leave_after_tokens is not None and len(stream.token_ids) >= leave_after_tokens:
                    stream.has_left = True
                    break
        if not stream.has_ended:
            stream.error = "the stream was cut off"
        return stream

    async def events(self, path: str, body: Any) -> list[Any]:
        """What a streaming OpenAI route sends, without the end mark."""
        found = []
        async with self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != httpx2.codes.OK:
                return [json.loads(await response.aread())]
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    found.append(json.loads(data))
        return found


@dataclass(frozen=True, slots=True)
class BesideStreams(Generic[Outcome]):
    outcome: Outcome
    streams: list[Stream]
    num_still_running: int
    """Streams that had not ended when the outcome was there."""


async def run_beside_streams(
    client: Client, prompts: Sequence[str], num_tokens: int, act: Callable[[], Awaitable[Outcome]]
) -> BesideStreams[Outcome]:
    """Acts while a stream of so many tokens runs for each prompt, and lets the streams end."""
    streams = [Stream(prompt) for prompt in prompts]
    tasks = [
        asyncio.create_task(client.stream(stream.prompt, into=stream, max_new_tokens=num_tokens)) for stream in streams
    ]
    while any(len(stream.token_ids) < _NUM_TOKENS_TO_BEGIN and not stream.has_ended for stream in streams):
        await asyncio.sleep(_POLL_S)
    outcome = await act()
    num_still_running = sum(not stream.has_ended for stream in streams)
    await asyncio.gather(*tasks)
    return BesideStreams(outcome, streams, num_still_running)


async def assert_well(client: Client) -> None:
    """Raises AssertionError unless `/health` is well, several times in a row."""
    assert [await client.health() for _ in range(NUM_HEALTH_CHECKS)] == [httpx2.codes.OK] * NUM_HEALTH_CHECKS
