"""`pagedkv up` with the unmodified gateway: OpenAI's API over two replicas, one of which is killed, and an end that
waits for a running answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pagedkv.integration.serve.child_process import command_path

from .conftest import MODEL_NAME, SETTINGS
from .deployment import Launch, free_ports, wait_for

TIMEOUT_S = 120


class Up:
    """A running `pagedkv up`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        assert process.stdout
        line = process.stdout.readline()
        assert line, log.read_text()
        self.summary = json.loads(line)


@pytest.fixture
def up(launch: Launch, tiny_model: Path, tmp_path: Path) -> Iterator[Up]:
    (port,) = free_ports(1)
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [command_path(), "up", str(tiny_model), "--replicas", "2", "--port", str(port), "--json", *settings]
    log = tmp_path / "log"
    with log.open("w") as file:
        command += ["--gateway", launch.program]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=dict(os.environ))
        try:
            yield Up(process, log)
        finally:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()


def test_the_api_is_served_a_killed_worker_comes_back_and_running_answers_finish(up: Up) -> None:
    import openai

    with openai.OpenAI(base_url=up.summary["url"], api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        messages = [{"role": "user", "content": "A prompt that is longer than some blocks of tokens. " * 8}]
        stream = client.chat.completions.create(
            model=MODEL_NAME, messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[-1].usage.completion_tokens <= 20
        whole = client.chat.completions.create(
            model=MODEL_NAME, messages=messages, max_tokens=8, n=2, seed=7, logprobs=True, top_logprobs=3, stop=["@@"]
        )
        assert [len(choice.logprobs.content) for choice in whole.choices] == [8, 8]
        assert whole.usage.prompt_tokens_details.cached_tokens >= 64

        victim = next(child for child in psutil.Process(up.process.pid).children() if "--listen" in child.cmdline())
        victim.kill()
        for _ in range(8):
            assert client.completions.create(model=MODEL_NAME, prompt="Again.", max_tokens=4).usage.completion_tokens
        wait_for(lambda: "it is started again in 1 s" in up.log.read_text(), "restart", TIMEOUT_S)

        running = client.completions.create(
            model=MODEL_NAME, prompt="On and on.", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        received = [next(iter(running))]
        threading.Timer(0.1, up.process.send_signal, [signal.SIGINT]).start()
        received += list(running)
    assert received[-1].choices[0].finish_reason == "length"
    assert up.process.wait(TIMEOUT_S) == 0
    time.sleep(0.2)
    assert not [one for one in psutil.process_iter() if str(up.summary["worker_urls"][0])[7:] in " ".join(_line(one))]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
