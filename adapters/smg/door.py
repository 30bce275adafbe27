"""The worker as a door of a server: closed until the backend is warm, since a gateway sends work to whoever answers."""

from __future__ import annotations

import asyncio

import grpc

from pagedkv.adapters.rpc.request_log import RequestLog
from pagedkv.adapters.smg.handlers import SERVICE_NAME, worker_handler
from pagedkv.adapters.smg.kv_events import KvEventLog
from pagedkv.adapters.smg.worker import SmgWorker, WorkerFacts
from pagedkv.plugin.errors import UnavailableError
from pagedkv.plugin.features import refuse_backend_without
from pagedkv.plugin.interface import Backend, Capacity, Tokenizer
from pagedkv.plugin.kv_events import FlushesPrefixCache, ReportsKVEvents
from pagedkv.plugin.observer import Observers
from pagedkv.plugin.requests import SAMPLING_FEATURES
from pagedkv.plugin.serving.loop import ServingLoop
from pagedkv.plugin.serving.step_thread import StepThread


class SmgDoor:
    """Serves a backend as `vllm.grpc.engine.VllmEngine`.

    Args:
        backend: loaded. Its calls run on `thread`.
        thread: of the backend.
        tokenizer: of the backend's model.
        facts: about model and configuration.
        observers: told of requests and steps, in addition to the log.
        is_shared: whether another door holds requests in the same backend.
        max_live_requests: that run and wait together.
        stuck_step_timeout_s: health fails when one step takes longer.

    Raises:
        UnsupportedError: the backend does not know parameters that the gateway sends.
    """

    def __init__(
        self,
        backend: Backend,
        thread: StepThread,
        tokenizer: Tokenizer,
        facts: WorkerFacts,
        *,
        observers: Observers | None = None,
        is_shared: bool = False,
        max_live_requests: int = 1024,
        stuck_step_timeout_s: float = 120.0,
    ) -> None:
        refuse_backend_without(backend, SAMPLING_FEATURES, "the protocol smg")
        self._backend = backend
        self._thread = thread
        self._tokenizer = tokenizer
        self._facts = facts
        observers = observers or Observers()
        self._observers = Observers((RequestLog(), *observers.requests), observers.steps)
        self._is_shared = is_shared
        self._max_live_requests = max_live_requests
        self._stuck_step_timeout_s = stuck_step_timeout_s
        self._loop: ServingLoop | None = None
        self._worker: SmgWorker | None = None

    @property
    def service_name(self) -> str:
        return SERVICE_NAME

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        return worker_handler(self._require_worker)

    @property
    def num_requests(self) -> int:
        """Samples that run or wait."""
        return self._loop.num_live if self._loop else 0

    def step_running_s(self) -> float:
        """How long the current step has been running, in seconds; 0 between steps."""
        return self._thread.busy_s() if self._loop else 0.0

    def find_health_fault(self) -> str | None:
        if self._loop is None:
            return "the server is not warmed up yet"
        busy_s = self._thread.busy_s()
        if busy_s > self._stuck_step_timeout_s:
            return f"a step has been running for {busy_s:.0f} s, which is taken for stuck"
        return self._loop.find_fault()

    async def open(self, capacity: Capacity) -> None:
        """Answers calls from now on. To be called after each warm-up of the backend, on the event loop of the calls."""
        if self._worker is not None:
            self._worker.capacity = capacity
            return
        self._loop = await asyncio.to_thread(self._make_loop)
        events = KvEventLog(self._backend.info.block_size) if isinstance(self._backend, ReportsKVEvents) else None
        if events is not None and not await self._listen(events):
            events = None
        self._worker = SmgWorker(
            self._loop,
            self._backend.info,
            capacity,
            self._tokenizer,
            self._facts,
            find_fault=self.find_health_fault,
            observers=self._observers,
            events=events,
            cache=self._backend if isinstance(self._backend, FlushesPrefixCache) else None,
        )

    def begin_drain(self) -> None:
        """Fails health, refuses new requests and ends the streams that never end by themselves."""
        if self._loop is not None and self._worker is not None:
            self._loop.begin_drain()
            self._worker.end_streams()

    async def close(self) -> None:
        """Ends every request. The backend and its thread stay. A second call does nothing."""
        if self._loop is not None:
            self.begin_drain()
            await asyncio.to_thread(self._loop.close)

    def _make_loop(self) -> ServingLoop:
        return ServingLoop(
            self._backend,
            self._thread,
            observers=self._observers,
            is_shared=self._is_shared,
            max_live_samples=self._max_live_requests,
        )

    async def _listen(self, events: KvEventLog) -> bool:
        backend = self._backend
        assert isinstance(backend, ReportsKVEvents)
        return await asyncio.wrap_future(self._thread.submit(lambda: backend.set_kv_event_listener(events)))

    def _require_worker(self) -> SmgWorker:
        if self._worker is None:
            raise UnavailableError("the server is not warmed up yet; try again later")
        return self._worker
