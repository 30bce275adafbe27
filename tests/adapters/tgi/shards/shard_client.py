"""Shards of the token model as processes, and a client that calls all of them as a router does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.plugin.conformance.token_model import TokenModel

SCRIPT = Path(__file__).with_name("shard_servers.py")
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
END_TIMEOUT_S = 30.0
FIRST_CHARACTER = 31


class Shards:
    """Running shards. Calls go to each after a delay of its own, so that they arrive in different orders."""

    def __init__(self, folder: Path, num_shards: int, pids: Sequence[int]) -> None:
        self.pids = pids
        self.folder = folder
        self.num_shards = num_shards
        self._channels = [grpc.insecure_channel(f"unix:{folder}/tgi-{rank}") for rank in range(num_shards)]
        self.stubs = [TextGenerationServiceStub(channel) for channel in self._channels]

    def call(
        self,
        method: str,
        request: Any,
        delays_s: Sequence[float] = (),
        cancel_after_s: Sequence[float] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Returns each shard's answer, or the error that it answered.

        Args:
            delays_s: of the call to each shard.
            cancel_after_s: when the client goes away from each shard, after its call.
            ranks: the shards that are called; None is all.
        """
        ranks = range(self.num_shards) if ranks is None else ranks
        delays_s = delays_s or [0.0] * self.num_shards

        def call_one(rank: int) -> Any:
            time.sleep(delays_s[rank])
            future = getattr(self.stubs[rank], method).future(request, timeout=CALL_TIMEOUT_S)
            if cancel_after_s is not None:
                time.sleep(cancel_after_s[rank])
                future.cancel()
            try:
                return future.result()
            except grpc.FutureCancelledError as error:
                return error
            except grpc.RpcError as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(call_one, ranks))

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def make_request(request_id: int, text: str, max_new_tokens: int) -> pb.Request:
    return pb.Request(
        id=request_id,
        inputs=text,
        truncate=1024,
        parameters=pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=max_new_tokens, ignore_eos_token=True),
    )


def make_prefill(batch_id: int, requests: Sequence[pb.Request], running: pb.CachedBatch | None = None) -> Any:
    return pb.PrefillRequest(batch=pb.Batch(id=batch_id, requests=requests, size=len(requests)), cached_batch=running)


def finish(shards: Shards, answers: list[Any], delays_s: Sequence[float] = ()) -> dict[int, list[int]]:
    """Decodes until all requests of a batch have ended; the tokens of each, by its id."""
    tokens: dict[int, list[int]] = {}
    while True:
        for answer in answers:
            if isinstance(answer, grpc.RpcError):
                raise answer
            for generation in answer.generations:
                tokens.setdefault(generation.request_id, []).extend(generation.tokens.ids)
        if not answers[0].HasField("batch"):
            return tokens
        answers = shards.call("Decode", pb.DecodeRequest(batches=[answers[0].batch]), delays_s)


_model = TokenModel()


def expected_tokens(text: str, num_tokens: int) -> list[int]:
    """What one process generates, by a model without any cache."""
    return _model.continue_greedily([ord(character) - FIRST_CHARACTER for character in text], num_tokens)


class Host:
    """The program that forks shards."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.logs: list[str] = []
        self.ends: list[tuple[int, str]] = []
        """How the shards of the last `running` ended: exit code and failure of each."""

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    @contextmanager
    def running(self, num_shards: int = 2, terminated_rank: int | None = 0, **options: Any) -> Iterator[Shards]:
        """Shards for the time of a `with`. At its end one of them gets SIGTERM, where `terminated_rank` is one."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pids = self._ask({"start": name, "num_shards": num_shards, **options})
            shards = Shards(folder, num_shards, pids)
            try:
                wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in range(num_shards)))
                yield shards
                if terminated_rank is not None:
                    os.kill(pids[terminated_rank], signal.SIGTERM)
            finally:
                shards.close()
                self.ends = [(code, failure) for code, failure in self._ask({"wait": END_TIMEOUT_S})]
                self.logs = [(folder / f"log-{rank}").read_text() for rank in range(num_shards)]

    def check_good_end(self) -> None:
        """The shards of the last `running` have drained, and no exception was lost in their logs."""
        assert self.ends == [(0, "")] * len(self.ends), self.logs
        assert not [log for log in self.logs if "Traceback" in log or "exception was never" in log]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(END_TIMEOUT_S)
        self._process.stdout.close()


def wait_until(condition: Callable[[], object], timeout_s: float = START_TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come in time"
        time.sleep(0.005)
