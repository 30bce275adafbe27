"""The model-server process: serves a config over gRPC until a signal ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from pagedkv.adapters.rpc.sockets import claim_socket_path, parse_listen_address, shard_path
from pagedkv.adapters.smg.door import SmgDoor
from pagedkv.adapters.smg.server import SmgServer
from pagedkv.adapters.tgi.server import GenerationServer
from pagedkv.integration.serve.chat_template import warn_of_hidden_template
from pagedkv.integration.serve.observers import ServerObservers, open_observers
from pagedkv.integration.serve.shards import joined_shards
from pagedkv.integration.serve.smg_facts import read_worker_facts
from pagedkv.integration.serve.weights import find_model_directory
from pagedkv.plugin.assemble import Assembly, assemble
from pagedkv.plugin.config import ENVIRONMENT_PREFIX, Config
from pagedkv.plugin.distributed import ShardGroup, ShardInfo
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import Capacity, WarmupLimits
from pagedkv.plugin.kv_dtypes import KVDtype
from pagedkv.plugin.resolved_config import ResolvedConfig
from pagedkv.plugin.service_links import list_service_links
from pagedkv.plugin.serving.step_thread import StepThread
from pagedkv.plugin.threads import choose_threads

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
"""How long shutdown waits for a running step. A step that takes longer is stuck; the process exits without it."""

EXIT_DRAINED = 0
EXIT_CUT_OFF = 1
"""Exit code if requests still ran when the drain timed out."""


@dataclass(frozen=True, slots=True)
class ServerSummary:
    """Facts about a server that is ready, for people (log) and programs (JSON)."""

    targets: tuple[str, ...]
    """Addresses that a gRPC client can connect to."""
    model: str
    architecture: str
    dtype: str
    device: str
    backend: str
    attention_kernels: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_cache_tokens: int
    max_total_tokens: int
    kv_bytes_total: int
    num_threads: int
    """Threads that compute on the CPU, of each shard."""
    metrics_urls: tuple[str, ...] = ()
    """URLs of the metrics, one a shard; empty if metrics are off."""

    @classmethod
    def create(
        cls,
        targets: list[str],
        assembly: Assembly,
        capacity: Capacity,
        metrics_url: str = "",
    ) -> ServerSummary:
        info = assembly.backend.info
        return cls(
            targets=tuple(targets),
            model=Path(assembly.config.model.path).name,
            architecture=info.model.architecture,
            dtype=str(info.dtype).removeprefix("torch."),
            device=str(info.device),
            backend=info.backend,
            attention_kernels=info.attention_kernels,
            kv_dtype=info.kv_dtype.name,
            block_size=info.block_size,
            num_blocks=capacity.num_blocks,
            max_cache_tokens=capacity.max_cache_tokens,
            max_total_tokens=capacity.max_total_tokens,
            kv_bytes_total=capacity.num_blocks * info.model.bytes_per_block(info.block_size, info.kv_dtype),
            num_threads=assembly.config.num_threads,
            metrics_urls=(metrics_url,) if metrics_url else (),
        )

    def to_json(self) -> str:
        return json.dumps({"event": "ready", **asdict(self)})

    def to_text(self) -> str:
        return (
            f"pagedkv is ready on {' and '.join(self.targets)}: {self.model} ({self.architecture}, {self.dtype}, "
            f"{self.device}), {self.backend} backend, {self.attention_kernels} attention, cache of "
            f"{self.max_cache_tokens} tokens ({self.kv_dtype}, {self.kv_bytes_total / 2**20:.0f} MiB)"
            + (f"; metrics on {' and '.join(self.metrics_urls)}" if self.metrics_urls else "")
        )


def run_server(
    config: Config, announce: Callable[[ServerSummary], None] | None, *, rank: int = 0, num_shards: int = 1
) -> int:
    """Serves until SIGTERM or SIGINT.

    At the first signal Health fails, new requests are refused, and running ones may finish within
    `server.drain_timeout_s`. A second signal ends the process at once. Warms up with the configured limits, so that the
    server works without a router; a router's Warmup repeats it.

    Args:
        config: with at least one address under `server`.
        announce: called once, when the server is ready. None leaves the warm-up to a router, which always sends one.
        rank: of this shard.
        num_shards: number of shards of the model.

    Returns:
        The process's exit code: EXIT_DRAINED or EXIT_CUT_OFF.

    Raises:
        PagedKVError: config, plugins, model or address can't be used; the message says what to change.
    """
    _check_addresses(config, rank)
    shard = ShardInfo(rank, num_shards)
    _refuse_sharded_gateway(config, num_shards)
    threads = choose_threads(config.model.threads, num_shards)
    with open_observers(config, shard) as observers, joined_shards(config, shard, threads.num_threads) as group:
        # Loaded where it will run: math libraries keep a team of threads for each thread that enters them.
        thread = StepThread()
        assembly = thread.run(lambda: assemble(config, threads))
        _log_config(assembly.config, config, observers.metrics_url)
        _warn_of_surroundings(config, rank)
        try:
            return asyncio.run(_serve(assembly, thread, config, announce, observers, group))
        finally:
            thread.run(assembly.backend.close)
            thread.close()


def _refuse_sharded_gateway(config: Config, num_shards: int) -> None:
    if num_shards > 1 and "smg" in config.server.protocols:
        raise ConfigError(
            'server.protocols has "smg", whose requests reach one process alone: serve without shards, as several '
            "workers behind the gateway, or leave it out"
        )


def _check_addresses(config: Config, rank: int) -> None:
    """Raises ConfigError for a bad address, before the model is loaded, which takes long."""
    if config.server.listen:
        parse_listen_address(config.server.listen)
    if config.server.uds_path:
        claim_socket_path(shard_path(config.server.uds_path, rank))


def _log_config(resolved: ResolvedConfig, config: Config, metrics_url: str) -> None:
    sections = {"server": config.server, "metrics": {"url": metrics_url}, "tracing": config.tracing}
    fields = _plain({**_as_dict(resolved), **sections})
    logger.info("resolved config: %s", json.dumps(fields), extra={"fields": fields})


def _warn_of_surroundings(config: Config, rank: int) -> None:
    """Logs what an operator should know about the environment and the model's files. Only rank 0 does."""
    if rank:
        return
    if links := list_service_links(os.environ, ENVIRONMENT_PREFIX):
        logger.info("variables of Kubernetes Services are no config keys, and are ignored: %s", ", ".join(links))
    directory = find_model_directory(config.model.path, config.model.revision or None)
    if directory is not None:
        warn_of_hidden_template(directory, config.model.path, os.environ)


async def _serve(
    assembly: Assembly,
    thread: StepThread,
    config: Config,
    announce: Callable[[ServerSummary], None] | None,
    observers: ServerObservers,
    group: ShardGroup | None,
) -> int:
    stop_asked = asyncio.Event()
    server = _make_server(assembly, thread, config, observers, group, stop_asked.set)
    observers.attach(server.service)
    _watch_signals(stop_asked.set)
    await server.start()
    try:
        if announce is not None:
            capacity = await server.warm_up(WarmupLimits())
            announce(ServerSummary.create(server.targets, assembly, capacity, observers.metrics_url))
        await stop_asked.wait()
        logger.info("draining: new requests are refused, running ones have %g s", config.server.drain_timeout_s)
        has_drained = await server.drain(config.server.drain_timeout_s)
    finally:
        await _stop(server)
    logger.info("stopped; %s", "every request had ended" if has_drained else "requests were cut off")
    return EXIT_DRAINED if has_drained else EXIT_CUT_OFF


def _make_server(
    assembly: Assembly,
    thread: StepThread,
    config: Config,
    observers: ServerObservers,
    group: ShardGroup | None,
    on_drain: Callable[[], None],
) -> GenerationServer | SmgServer:
    """The server of all protocols that the config names."""
    backend, tokenizer, shard, settings = assembly.backend, assembly.tokenizer, observers.shard, config.server
    told = observers.observe(backend)
    smg = None
    if "smg" in settings.protocols:
        smg = SmgDoor(
            backend,
            thread,
            tokenizer,
            read_worker_facts(config, assembly.config),
            observers=told,
            is_shared="tgi" in settings.protocols,
            max_live_requests=settings.max_live_requests,
            stuck_step_timeout_s=settings.stuck_step_timeout_s,
        )
        if "tgi" not in settings.protocols:
            return SmgServer(backend, thread, smg, settings)
    return GenerationServer(
        backend,
        tokenizer,
        settings,
        rank=shard.rank,
        num_shards=shard.num_shards,
        observers=told,
        group=group,
        on_drain=on_drain,
        thread=thread,
        second_door=smg,
    )


async def _stop(server: GenerationServer | SmgServer) -> None:
    try:
        await asyncio.wait_for(server.stop(), _STOP_TIMEOUT_S)
    except asyncio.TimeoutError:
        logger.error("a step is stuck; ending the process around it")
        _exit_now(EXIT_CUT_OFF)


def _watch_signals(stop: Callable[[], None]) -> None:
    """Calls `stop` at the first signal. The second signal ends the process."""
    signals: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        if signals:
            logger.warning("%s again: ending at once", number.name)
            _exit_now(128 + number)
        logger.info("%s", number.name)
        signals.append(number)
        stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _exit_now(code: int) -> None:
    """Exits without waiting for threads. A normal exit would wait for the thread that runs a step."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _as_dict(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _plain(value: Any) -> Any:
    """Converts a value to what JSON can hold: nested dicts and lists of strings, numbers and booleans."""
    if isinstance(value, KVDtype):
        return value.name
    if is_dataclass(value):
        return _plain(_as_dict(value))
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump())
    if isinstance(value, dict):
        return {key: _plain(nested) for key, nested in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(nested) for nested in value]
    return value if isinstance(value, (str, int, float, bool)) else str(value).removeprefix("torch.")
