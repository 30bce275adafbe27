"""Runs pagedkv's server in a separate process, and calls it over a Unix socket in a router's order."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import grpc

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.answers import CACHED_TOKENS_METADATA
from pagedkv.adapters.tgi.client import KEEP_ALL_TOKENS
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.integration.measure.benchmark.workloads import to_text
from pagedkv.plugin.config import DEFAULT_MAX_MESSAGE_BYTES, load_config
from pagedkv.plugin.registry import MODELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_model_settings

from .own_server import describe_server, own_server
from .protocol import Recorder, RunEngine, RunRequest


class TgiEngine(RunEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        """Starts the server. `options` are those of `InProcessEngine`."""
        settings = resolve_model_settings(load_config(options["config_file"], options["overrides"]))
        self._tokenizer = load_plugin(MODELS, settings.adapter).load_tokenizer(settings)
        self._stack = ExitStack()
        server = self._stack.enter_context(own_server(options, ["--uds-path", "{folder}/socket"]))
        limits = [("grpc.max_receive_message_length", DEFAULT_MAX_MESSAGE_BYTES)]
        channel = self._stack.enter_context(grpc.insecure_channel(server.target, options=limits))
        self._stub = TextGenerationServiceStub(channel)
        self._batch_ids = itertools.count(1)
        self._can_join_prefill = self._stub.Info(pb.InfoRequest()).support_chunking
        self.info = describe_server(server, "tgi")

    def run(self, recorder: Recorder) -> dict[str, Any]:
        messages = [self._to_message(index, request) for index, request in enumerate(recorder.requests)]
        recorder.restart_clock()
        running: list[pb.CachedBatch] = []
        while not recorder.is_done:
            arrived = [messages[index] for index in recorder.due()]
            if arrived:
                running = self._prefill(recorder, arrived, running)
            elif running:
                running = self._take(recorder, self._stub.Decode.with_call(pb.DecodeRequest(batches=running)))
            else:
                recorder.wait()
        return {}

    def close(self) -> None:
        self._stack.close()

    def _prefill(
        self, recorder: Recorder, requests: list[pb.Request], running: list[pb.CachedBatch]
    ) -> list[pb.CachedBatch]:
        """Runs a step over new requests, with the running batch if the server can do so; else joins it at the next."""
        prefill = pb.PrefillRequest(batch=pb.Batch(id=next(self._batch_ids), requests=requests, size=len(requests)))
        if running and self._can_join_prefill:
            prefill.cached_batch.CopyFrom(running[0])
            running = []
        return running + self._take(recorder, self._stub.Prefill.with_call(prefill))

    def _take(self, recorder: Recorder, answer: tuple[Any, grpc.Call]) -> list[pb.CachedBatch]:
        response, call = answer
        entries = (str(value) for key, value in call.trailing_metadata() or () if key == CACHED_TOKENS_METADATA)
        cached = {int(id_): int(count) for id_, count in (entry.split("=") for entry in entries)}
        for generation in response.generations:
            id_ = generation.request_id
            recorder.count(id_, len(generation.tokens.ids), cached.get(id_))
        return [response.batch] if response.HasField("batch") else []

    def _to_message(self, index: int, request: RunRequest) -> pb.Request:
        text = to_text(self._tokenizer, request.prompt_ids)
        return pb.Request(
            id=index,
            inputs=text,
            input_chunks=pb.Input(chunks=[pb.InputChunk(text=text)]),
            truncate=KEEP_ALL_TOKENS,
            add_special_tokens=False,
            parameters=pb.NextTokenChooserParameters(temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0),
            stopping_parameters=pb.StoppingCriteriaParameters(
                max_new_tokens=request.max_new_tokens, ignore_eos_token=True
            ),
        )


def load(options: dict[str, Any]) -> TgiEngine:
    return TgiEngine(options)
