"""A real gRPC server around a tiny backend, service by a real metrics endpoint."""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.adapters.tgi.server import GenerationServer
from pagedkv.integration.serve.observers import ServerObservers, open_observers
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.distributed import ShardInfo
from pagedkv.plugin.interface import Backend, WarmupLimits
from pagedkv.plugin.observer import RequestObserver
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config

Labels = Mapping[str, str]


class LetterTokenizer:
    """One id a character; enough for a model of 97 tokens."""

    all_special_ids = (0,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + ord(character) % 96 for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(32 + token_id % 95) for token_id in token_ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Scrape:
    """What the endpoint served."""

    kinds: Mapping[str, str]
    """Type of each family; a counter's name without "_total"."""
    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    """By name and labels, all of them."""

    def value(self, name: str, **labels: str) -> float:
        """Sum over the samples of a name that have these labels; there must be one."""
        found = [
            value for (own, has), value in self.samples.items() if own == name and labels.items() <= dict(has).items()
        ]
        assert found, f"{name} with {labels} is not served"
        return sum(found)


def scrape(url: str) -> Scrape:
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return Scrape(
        {family.name: family.type for family in families},
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        },
    )


@dataclass(slots=True)
class Served:
    """A server, its client and its observers."""

    server: GenerationServer
    backend: Backend
    observers: ServerObservers
    stub: Any

    def scrape(self) -> Scrape:
        return scrape(self.observers.metrics_url)

    async def prefill(
        self, batch_id: int, *requests: pb.Request, running: Any = None, **call: Any
    ) -> pb.PrefillResponse:
        batch = pb.Batch(id=batch_id, requests=requests, size=len(requests))
        return await self.stub.Prefill(pb.PrefillRequest(batch=batch, cached_batch=running), timeout=60, **call)

    async def decode(self, *batch_ids: int) -> pb.DecodeResponse:
        batches = [pb.CachedBatch(id=batch_id) for batch_id in batch_ids]
        return await self.stub.Decode(pb.DecodeRequest(batches=batches), timeout=60)

    async def finish(self, response: Any, after_step: Callable[[], None] = lambda: None) -> None:
        """Decodes until all requests of an answer have ended."""
        while response.HasField("batch"):
            after_step()
            response = await self.decode(response.batch.id)

    async def clear(self) -> None:
        await self.stub.ClearCache(pb.ClearCacheRequest(), timeout=60)


def ask(request_id: int, text: str, max_new_tokens: int = 4, **fields: Any) -> pb.Request:
    stopping = {"max_new_tokens": max_new_tokens, "ignore_eos_token": True, **fields.pop("stopping_parameters", {})}
    return pb.Request(
        id=request_id,
        inputs=text,
        truncate=4096,
        parameters=pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1),
        stopping_parameters=pb.StoppingCriteriaParameters(**stopping),
        **fields,
    )


def make_backend(num_blocks: int) -> PagedBackend:
    """The paged backend over a model without weights; blocks of 8 tokens."""
    model = TokenModel()
    written = {"model": {"path": "none"}, "cache": {"num_blocks": num_blocks, "block_size": 8}}
    config = resolve_config(parse_config({**written, "scheduler": {"max_step_tokens": 64}}), model.spec)
    return PagedBackend(config, model, load_plugin(KERNELS, "reference").create(torch.device("cpu")))


@dataclass(frozen=True, slots=True)
class Lab:
    """What the tests build with."""

    folder: Path
    ask: Callable[..., pb.Request] = ask
    make_backend: Callable[[int], PagedBackend] = make_backend
    scrape: Callable[[str], Scrape] = scrape

    @asynccontextmanager
    async def serve(
        self,
        backend: Backend,
        tokenizer: Any = None,
        extra_observers: tuple[RequestObserver, ...] = (),
        name: str = "socket",
        **server_keys: Any,
    ) -> AsyncIterator[Served]:
        """A warmed-up server; its backend is closed at the end."""
        config = parse_config(
            {
                "model": {"path": "tiny"},
                "metrics": {"listen": "127.0.0.1:0"},
                "server": {"uds_path": str(self.folder / name), **server_keys},
            }
        )
        with open_observers(config, ShardInfo()) as opened:
            observers = opened.observe(backend)
            observers = replace(observers, requests=(*observers.requests, *extra_observers))
            assert opened.metrics is not None
            server = GenerationServer(backend, tokenizer or LetterTokenizer(), config.server, observers=observers)
            opened.metrics.attach(server.service)
            async with server, grpc.aio.insecure_channel(server.targets[0]) as channel:
                await server.warm_up(WarmupLimits())
                yield Served(server, backend, opened, TextGenerationServiceStub(channel))
            backend.close()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)
