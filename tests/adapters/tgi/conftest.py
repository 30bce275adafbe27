"""A small deterministic backend, and a server around any backend on a real Unix socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import grpc
import pytest
import torch

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.adapters.tgi.server import GenerationServer
from pagedkv.plugin.config import ServerSection
from pagedkv.plugin.errors import UnavailableError
from pagedkv.plugin.interface import BackendInfo, Capacity, WarmupLimits
from pagedkv.plugin.kv_dtypes import find_kv_dtype
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec
from pagedkv.plugin.requests import Request, RequestId, StepOutput, TokenLogprob, find_finish_reason
from pagedkv.plugin.stats import BackendStats
from pagedkv.plugin.validation import validate_requests

EOS_ID = 1
NUM_SPECIAL_IDS = 2
MAX_TOTAL_TOKENS = 256
CALL_TIMEOUT_S = 120


class ByteTokenizer:
    """Ids 0 and 1 are special, 2 + b is the byte b. `bos` puts a special token before every prompt."""

    all_special_ids = (0, EOS_ID)

    def __init__(self, has_bos: bool = False) -> None:
        self._prefix = [0] if has_bos else []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        prefix = self._prefix if add_special_tokens else []
        return [*prefix, *(byte + NUM_SPECIAL_IDS for byte in text.encode())]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        specials = {0: b"" if skip_special_tokens else b"<s>", EOS_ID: b"" if skip_special_tokens else b"</s>"}
        return b"".join(
            specials[id_] if id_ < NUM_SPECIAL_IDS else bytes([id_ - NUM_SPECIAL_IDS]) for id_ in token_ids
        ).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Any]) -> str:
        raise NotImplementedError


@dataclass
class CountingBackend:
    """Each next token is the last one plus one: "a" goes on as "bcdef…", and after "z" comes the end.

    A step takes at most `prefill_budget` prompt tokens; a request whose prompt is not through has no token.
    """

    interface_version: ClassVar[int] = 1
    requires_padding: bool = False
    prefill_budget: int = 10_000
    before_step: Callable[[list[RequestId]], None] = lambda ids: None
    requests: dict[RequestId, Request] = field(default_factory=dict)
    generated: dict[RequestId, list[int]] = field(default_factory=dict)
    num_prefilled: dict[RequestId, int] = field(default_factory=dict)
    num_steps: int = 0
    num_integrity_checks: int = 0
    is_warm: bool = False
    limits: WarmupLimits | None = None

    @classmethod
    def create(cls, config: Any) -> CountingBackend:
        return cls()

    @property
    def info(self) -> BackendInfo:
        spec = ModelSpec("Counting", torch.float32, (AttentionSpec(1, 1, 8, 8),), 258, 8, 8192, (EOS_ID,), None, None)
        return BackendInfo(
            backend="counting",
            model=spec,
            device=torch.device("cpu"),
            dtype=torch.float32,
            kv_dtype=find_kv_dtype("fp32"),
            attention_kernels="none",
            block_size=16,
            requires_padding=self.requires_padding,
            can_chunk_prefill=not self.requires_padding,
            has_prefix_cache=True,
        )

    def warmup(self, limits: WarmupLimits) -> Capacity:
        self.limits = limits
        self.is_warm = True
        return Capacity(
            4096,
            limits.max_input_tokens or MAX_TOTAL_TOKENS - 1,
            limits.max_total_tokens or MAX_TOTAL_TOKENS,
            256,
        )

    def add(self, requests: Sequence[Request]) -> None:
        if not self.is_warm:
            raise UnavailableError("not warmed up")
        validate_requests(requests, self.requests, 258, MAX_TOTAL_TOKENS - 1, MAX_TOTAL_TOKENS)
        for request in requests:
            self.requests[request.id] = request
            self.generated[request.id] = []
            self.num_prefilled[request.id] = 0

    def step(self, only: Collection[RequestId] | None = None) -> list[StepOutput]:
        ids = [id_ for id_ in self.requests if only is None or id_ in only]
        self.num_steps += 1
        self.before_step(ids)
        budget = self.prefill_budget
        outputs = []
        for id_ in ids:
            chunk = min(budget, len(self.requests[id_].prompt_ids) - self.num_prefilled[id_])
            self.num_prefilled[id_] += chunk
            budget -= chunk
            if self.num_prefilled[id_] == len(self.requests[id_].prompt_ids):
                outputs.append(self._next(self.requests[id_]))
        self.abort([output.request_id for output in outputs if output.finish_reason])
        return outputs

    def _next(self, request: Request) -> StepOutput:
        generated = self.generated[request.id]
        last = (generated or request.prompt_ids)[-1]
        token_id = EOS_ID if last == ord("z") + NUM_SPECIAL_IDS else (last + 1) % 258
        generated.append(token_id)
        params = request.params
        logprobs = None
        if params.prefill_logprobs and len(generated) == 1:
            logprobs = (float("nan"), *(-0.5 for _ in request.prompt_ids[1:]))
        return StepOutput(
            request_id=request.id,
            token=TokenLogprob(token_id, -0.25),
            top_tokens=tuple(TokenLogprob((token_id + i) % 258, -0.25 - i) for i in range(params.top_n_tokens)),
            prefill_logprobs=logprobs,
            num_cached_tokens=len(request.prompt_ids) // 16 * 16,
            finish_reason=find_finish_reason(params, len(generated), token_id, (EOS_ID,)),
            seed=params.seed if params.is_sampled else None,
        )

    def abort(self, ids: Collection[RequestId]) -> None:
        for id_ in ids:
            self.requests.pop(id_, None)
            self.generated.pop(id_, None)
            self.num_prefilled.pop(id_, None)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def stats(self) -> BackendStats:
        raise NotImplementedError

    def check_integrity(self) -> None:
        self.num_integrity_checks += 1

    def close(self) -> None:
        self.requests.clear()


class Wire:
    """A client on a real channel, with short ways to say what tests say often."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target, options=[("grpc.max_send_message_length", -1)])
        self.stub = TextGenerationServiceStub(self.channel)

    def request(self, request_id: int, text: str, max_new_tokens: int = 5, **fields: Any) -> pb.Request:
        parameters = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, **fields.pop("parameters", {})}
        stopping = {"max_new_tokens": max_new_tokens, **fields.pop("stopping_parameters", {})}
        return pb.Request(
            **{
                "id": request_id,
                "input_chunks": pb.Input(chunks=[pb.InputChunk(text=text)]),
                "truncate": 1024,
                "parameters": pb.NextTokenChooserParameters(**parameters),
                "stopping_parameters": pb.StoppingCriteriaParameters(**stopping),
                "add_special_tokens": True,
                **fields,
            }
        )

    def prefill(
        self, batch_id: int, *requests: pb.Request, running: pb.CachedBatch | None = None
    ) -> pb.PrefillResponse:
        batch = pb.Batch(id=batch_id, requests=requests, size=len(requests))
        return self.stub.Prefill(pb.PrefillRequest(batch=batch, cached_batch=running), timeout=CALL_TIMEOUT_S)

    def decode(self, *batches: pb.CachedBatch | int) -> pb.DecodeResponse:
        named = [pb.CachedBatch(id=batch) if isinstance(batch, int) else batch for batch in batches]
        return self.stub.Decode(pb.DecodeRequest(batches=named), timeout=CALL_TIMEOUT_S)

    def filter(self, batch_id: int, *request_ids: int) -> pb.CachedBatch:
        return self.stub.FilterBatch(
            pb.FilterBatchRequest(batch_id=batch_id, request_ids=request_ids), timeout=CALL_TIMEOUT_S
        ).batch

    def clear(self, batch_id: int | None = None) -> None:
        self.stub.ClearCache(pb.ClearCacheRequest(id=batch_id), timeout=CALL_TIMEOUT_S)

    def health(self) -> None:
        self.stub.Health(pb.HealthRequest(), timeout=1)

    def finish(self, response: pb.PrefillResponse | pb.DecodeResponse) -> dict[int, str]:
        """Decodes until all requests of an answer have ended; their texts by id."""
        texts = {g.request_id: g.generated_text.text for g in response.generations if g.HasField("generated_text")}
        while response.HasField("batch"):
            response = self.decode(response.batch)
            texts |= {g.request_id: g.generated_text.text for g in response.generations if g.HasField("generated_text")}
        return texts

    def ended_early(self, *requests: pb.Request, batch_id: int = 9000) -> dict[int, str]:
        """Texts of the requests of a new batch, all of which end in its first answer without a token of the model."""
        response = self.prefill(batch_id, *requests)
        assert not response.HasField("batch")
        for generation in response.generations:
            assert list(generation.tokens.logprobs) == [0.0]
            assert generation.generated_text.finish_reason == pb.FINISH_REASON_EOS_TOKEN
            assert generation.generated_text.generated_tokens == 1, "a router divides by it"
        return {generation.request_id: generation.generated_text.text for generation in response.generations}

    def refused(self, call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
        """Code and text that a call is refused with."""
        with pytest.raises(grpc.RpcError) as caught:
            call()
        return caught.value.code(), caught.value.details()


class LoopThread:
    """An event loop on a thread, for servers that live beside a test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-server", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(CALL_TIMEOUT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def serving(loop_thread: LoopThread) -> Callable[..., Any]:
    """`with serving(backend, tokenizer, folder, **keys) as served:` runs a server; `served.wire` talks to it."""

    @contextmanager
    def serve(backend: Any, tokenizer: Any, folder: Path, **options: Any) -> Iterator[SimpleNamespace]:
        own = ("rank", "num_shards", "observers", "thread")
        places = {key: options.pop(key) for key in own if key in options}
        limits = options.pop("warmup_limits", WarmupLimits())
        config = ServerSection(uds_path=str(folder / "tgi"), **options)

        async def start() -> GenerationServer:
            server = GenerationServer(backend, tokenizer, config, **places)
            await server.start()
            if limits is not None:
                await server.warm_up(limits)
            return server

        server = loop_thread.call(start())
        wire = Wire(server.targets[0])
        try:
            yield SimpleNamespace(
                server=server, wire=wire, backend=backend, call=loop_thread.call, target=server.targets[0]
            )
        finally:
            wire.channel.close()
            loop_thread.call(server.stop())

    return serve


@pytest.fixture
def backend() -> CountingBackend:
    return CountingBackend()


@pytest.fixture
def make_backend() -> type[CountingBackend]:
    return CountingBackend


@pytest.fixture
def make_tokenizer() -> type[ByteTokenizer]:
    return ByteTokenizer


@pytest.fixture
def served(backend: CountingBackend, serving: Callable[..., Any], tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A server around the `backend` fixture. A test leaves no request live in it."""
    with serving(backend, ByteTokenizer(), tmp_path) as served:
        yield served
        assert served.server.service.num_requests == 0
        assert not backend.requests


@pytest.fixture
def wire(served: SimpleNamespace) -> Wire:
    return served.wire
