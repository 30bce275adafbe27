"""A deployment of the real SMG gateway and a worker that tests share."""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from .deployment import PROGRAM_VARIABLE, Gateway, Launch
from .gateway_reference import GatewayReference

if typing.TYPE_CHECKING:
    import anthropic
    import openai

SETTINGS = (
    "cache.num_blocks=1024",
    "limits.max_total_tokens=4096",
    "scheduler.max_step_tokens=512",
    "server.served_model_name=tiny",
)
MODEL_NAME = "tiny"
TIMEOUT_S = 900
"""Of a test: starts take long where other work has the cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason=f"{PROGRAM_VARIABLE} does not name the gateway's program, smg")
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if not os.environ.get(PROGRAM_VARIABLE):
            item.add_marker(skip)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    program = Path(os.environ[PROGRAM_VARIABLE]).absolute()
    assert program.is_file(), f"{PROGRAM_VARIABLE} is {program}, and there is no such file"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(PROGRAM_VARIABLE)  # A worker refuses variables of its prefix that it does not know.
        yield Launch(str(program), tmp_path_factory.mktemp("gateway"))


@pytest.fixture(scope="session")
def tiny_model(save_tiny_llama: Callable[..., Path]) -> Path:
    """Random, float32, with the demo model's tokenizer and chat template."""
    return save_tiny_llama(max_position_embeddings=4096)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The references and the workers share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> GatewayReference:
    return GatewayReference(tiny_model)


@pytest.fixture(scope="session")
def gateway(launch: Launch, tiny_model: Path) -> Iterator[Gateway]:
    """One worker behind a gateway. Tests share it and stop nothing."""
    with launch.deployment(tiny_model, settings=SETTINGS) as started:
        yield started


@pytest.fixture(scope="session")
def openai_client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def anthropic_client(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client
