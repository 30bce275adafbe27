"""It starts as the launcher starts it, and what the launcher asks for is done or refused in a line of its log."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import SETTINGS
from .deployment import Deployment, Launch
from .reference import MAX_PIECE_TOKENS, Reference
from .traffic import Client, Reply, assert_well

PROMPTS = [f"The story of number {index}" for index in range(24)]
NUM_TOKENS = 20
OK = 200


async def _generate_all(url: str, prompts: list[str], num_tokens: int) -> list[Reply]:
    async with Client(url) as client:
        replies = await asyncio.gather(*(client.generate(prompt, max_new_tokens=num_tokens) for prompt in prompts))
        await assert_well(client)
        return replies


def assert_answers(deployment: Deployment, reference: Reference) -> None:
    """Greedy answers at once equal transformers', and nothing stays behind."""
    replies = asyncio.run(_generate_all(deployment.url, PROMPTS, NUM_TOKENS))
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        assert reply.status == OK, reply
        assert tuple(reply.token_ids) == reference.greedy(prompt, NUM_TOKENS)
    deployment.wait_until_idle()


def read_info(deployment: Deployment) -> dict[str, Any]:
    async def scenario() -> Reply:
        async with Client(deployment.url) as client:
            return await client.get("/info")

    info: dict[str, Any] = asyncio.run(scenario()).body
    return info


def test_with_the_launcher_s_defaults(launch: Launch, tiny_model: Path, reference: Reference) -> None:
    with launch.launcher(tiny_model) as deployment:
        assert_answers(deployment, reference)


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_a_pool_smaller_than_the_model_s_positions_serves_its_longest_request(
    launch: Launch, tiny_model: Path, reference: Reference, backend: str
) -> None:
    """No length is asked for, so the server tells the ones that it can keep, and the router admits what it told."""
    settings = {"PAGEDKV_BACKEND": backend, "PAGEDKV_CACHE_NUM_BLOCKS": "128"}
    with launch.launcher(tiny_model, settings=settings) as deployment:
        info = read_info(deployment)
        assert info["max_input_tokens"] < info["max_total_tokens"] <= 128 * 16
        prompt = " ".join(["word"] * (info["max_total_tokens"] - MAX_PIECE_TOKENS))
        longest, following = asyncio.run(_generate_in_turn(deployment.url, [prompt, PROMPTS[0]], MAX_PIECE_TOKENS))
        assert tuple(longest.token_ids) == reference.greedy(prompt, MAX_PIECE_TOKENS)
        assert following.token_ids[:NUM_TOKENS] == list(reference.greedy(PROMPTS[0], NUM_TOKENS))
        deployment.wait_until_idle()


async def _generate_in_turn(url: str, prompts: list[str], num_tokens: int) -> list[Reply]:
    """Each waits in the router's queue behind those before it."""
    async with Client(url) as client:
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.create_task(client.generate(prompt, max_new_tokens=num_tokens)))
            await asyncio.sleep(0.1)
        return await asyncio.gather(*tasks)


def test_contiguous_with_the_router_s_defaults(launch: Launch, save_tiny_llama: Any) -> None:
    """A model of more positions than the router's prompt budget, which without chunking bounds a prompt."""
    model = save_tiny_llama(max_position_embeddings=8192)
    with launch.launcher(model, settings={"PAGEDKV_BACKEND": "contiguous"}) as deployment:
        assert read_info(deployment)["max_input_tokens"] <= 4096
        assert_answers(deployment, Reference(model))


def test_flags_of_the_launcher_are_honoured(launch: Launch, tiny_model: Path) -> None:
    flags = "--dtype bfloat16 --kv-cache-dtype fp8_e4m3fn --max-input-tokens 1500 --max-total-tokens 2048"
    flags += (
        " --max-batch-prefill-tokens 512 --max-batch-size 4 --cuda-memory-fraction 0.8 --cuda-graphs 0 --json-output"
    )
    with launch.launcher(tiny_model, *flags.split(), settings=SETTINGS) as deployment:
        info = read_info(deployment)
        assert (info["max_input_tokens"], info["max_total_tokens"]) == (1500, 2048)
        labels = {"dtype": "bfloat16", "kv_dtype": "fp8_e4m3"}
        assert deployment.metric("pagedkv_info", **labels) == 1
        before = deployment.metric("pagedkv_step_duration_seconds_count", phase="prefill")
        (reply,) = asyncio.run(_generate_all(deployment.url, [" ".join(["word"] * 1400)], 1))
        assert reply.status == OK
        assert deployment.metric("pagedkv_step_duration_seconds_count", phase="prefill") == before + 3
        deployment.wait_until_idle()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--quantize eetq", "eetq"),
        ("--speculate 2", "--speculate"),
        ("--lora-adapters mine=/some/folder", "LORA_ADAPTERS"),
        ("--rope-scaling linear --rope-factor 2", "ROPE_SCALING"),
        ("--watermark-gamma 0.7", "WATERMARK_GAMMA"),
    ],
)
def test_flags_that_can_t_be_honoured_are_named_in_the_launcher_s_log(
    launch: Launch, tiny_model: Path, flags: str, word: str
) -> None:
    code, log = launch.run_until_end(tiny_model, *flags.split())
    assert code != 0
    assert any(word in line and "ERROR" in line for line in log.splitlines())


def test_a_checkpoint_with_a_template_in_jinja_alone_says_what_cures_it(launch: Launch, save_tiny_llama: Any) -> None:
    """And then chats."""
    model = save_tiny_llama(max_position_embeddings=4096)
    (model / "chat_template.json").unlink()
    command = "export-chat-template"
    with launch.launcher(model, settings=SETTINGS) as deployment:
        assert any(command in line and "WARN" in line for line in deployment.program.text().splitlines())
        assert asyncio.run(_chat(deployment.url)).status == 422
    pagedkv = shutil.which("pagedkv", path=str(Path(sys.executable).parent))
    assert pagedkv is not None
    subprocess.run([pagedkv, command, str(model)], check=True, timeout=120)
    with launch.launcher(model, settings=SETTINGS) as deployment:
        assert command not in deployment.program.text()
        assert asyncio.run(_chat(deployment.url)).status == OK


async def _chat(url: str) -> Reply:
    async with Client(url) as client:
        return await client.chat("Say hello.", max_tokens=4)
