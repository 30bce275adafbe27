"""Over TCP a caller can't name, end or size what is another's; the Unix socket may do everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub

KEY = "x-tenant"
TIMEOUT_S = 20


class Caller:
    """Calls over TCP as one tenant."""

    def __init__(self, channel: grpc.Channel, request: Callable[..., pb.Request], tenant: str) -> None:
        self._stub = TextGenerationServiceStub(channel)
        self._request = request
        self._metadata = ((KEY, tenant),) if tenant else ()

    def call(self, method: str, message: Any) -> Any:
        return getattr(self._stub, method)(message, metadata=self._metadata, timeout=TIMEOUT_S)

    def prefill(self, batch_id: int, running: int | None = None) -> pb.PrefillResponse:
        batch = pb.Batch(id=batch_id, requests=[self._request(batch_id, "a", 50)], size=1)
        cached = None if running is None else pb.CachedBatch(id=running)
        return self.call("Prefill", pb.PrefillRequest(batch=batch, cached_batch=cached))

    def decode(self, *batch_ids: int) -> pb.DecodeResponse:
        return self.call("Decode", pb.DecodeRequest(batches=[pb.CachedBatch(id=id_) for id_ in batch_ids]))

    def code_of(self, method: str, message: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, message)
        return caught.value.code()


@pytest.fixture
def served(serving: Callable[..., Any], backend: Any, make_tokenizer: Any, tmp_path: Path) -> Iterator[Any]:
    options = {"listen": "127.0.0.1:0", "cache_salt_metadata_key": KEY}
    with serving(backend, make_tokenizer(), tmp_path, **options) as served:
        yield served


@pytest.fixture
def caller(served: Any) -> Iterator[Callable[[str], Caller]]:
    channel = grpc.insecure_channel(served.server.tcp_address)
    yield lambda tenant: Caller(channel, served.wire.request, tenant)
    channel.close()


def test_another_s_batch_does_not_exist(caller: Callable[[str], Caller]) -> None:
    ours, theirs = caller("a"), caller("b")
    ours.prefill(1)
    theirs.prefill(2)
    named = [
        ("Decode", pb.DecodeRequest(batches=[pb.CachedBatch(id=1)])),
        ("Decode", pb.DecodeRequest(batches=[pb.CachedBatch(id=2), pb.CachedBatch(id=1)])),
        ("FilterBatch", pb.FilterBatchRequest(batch_id=1, request_ids=[])),
    ]
    for method, message in named:
        assert theirs.code_of(method, message) is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as caught:
        theirs.prefill(3, running=1)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    theirs.call("ClearCache", pb.ClearCacheRequest(id=1))
    assert len(ours.decode(1).generations) == 1, "it still runs"
    assert len(theirs.decode(2).generations) == 1


def test_an_id_that_is_taken_does_not_change_hands(caller: Callable[[str], Caller]) -> None:
    ours, theirs = caller("a"), caller("b")
    ours.prefill(1)
    with pytest.raises(grpc.RpcError) as caught:
        theirs.prefill(1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert theirs.code_of("Decode", pb.DecodeRequest(batches=[pb.CachedBatch(id=1)])) is grpc.StatusCode.NOT_FOUND
    ours.call("ClearCache", pb.ClearCacheRequest(id=1))
    assert len(theirs.prefill(1).generations) == 1, "it is free again"


def test_clearing_all_ends_the_caller_s_own_batches_alone(caller: Callable[[str], Caller], served: Any) -> None:
    ours, theirs = caller("a"), caller("b")
    ours.prefill(1)
    ours.prefill(2)
    theirs.prefill(3)
    ours.call("ClearCache", pb.ClearCacheRequest())
    assert len(served.backend.requests) == 1
    assert len(theirs.decode(3).generations) == 1


def test_without_a_tenant_nobody_clears_or_sizes_all(caller: Callable[[str], Caller]) -> None:
    nobody, ours = caller(""), caller("a")
    ours.prefill(1)
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert nobody.code_of("ClearCache", pb.ClearCacheRequest()) is denied
    assert nobody.code_of("Warmup", pb.WarmupRequest(max_prefill_tokens=64)) is denied
    assert len(ours.decode(1).generations) == 1


def test_the_unix_socket_may_name_and_end_everything(caller: Callable[[str], Caller], served: Any) -> None:
    caller("a").prefill(1)
    assert len(served.wire.decode(1).generations) == 1
    served.wire.clear()
    assert not served.backend.requests


def test_where_nothing_tells_callers_apart_they_are_one(
    serving: Callable[..., Any], backend: Any, make_tokenizer: Any, tmp_path: Path
) -> None:
    with serving(backend, make_tokenizer(), tmp_path, listen="127.0.0.1:0") as served:
        with grpc.insecure_channel(served.server.tcp_address) as first:
            Caller(first, served.wire.request, "").prefill(1)
        with grpc.insecure_channel(served.server.tcp_address) as second:
            other = Caller(second, served.wire.request, "")
            assert len(other.decode(1).generations) == 1
            other.call("ClearCache", pb.ClearCacheRequest())
        assert not served.backend.requests
