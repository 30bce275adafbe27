"""Parts of a server in this process: the token model, whose right output is known without a cache, behind real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from pagedkv.adapters.tgi.server import GenerationServer
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import ServerSection, load_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.interface import Backend
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config

from .double.router import Router
from .double.shards import Shards
from .double.validation import RouterFlags

VOCAB_SIZE = 97
EOS_ID = 0
FIRST_CHARACTER = 0x100


class CharacterTokenizer:
    """Each id is one character, so that text and ids say the same."""

    all_special_ids = (EOS_ID,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [(ord(character) - FIRST_CHARACTER) % VOCAB_SIZE for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            chr(token_id + FIRST_CHARACTER) for token_id in token_ids if token_id != EOS_ID or not skip_special_tokens
        )

    def apply_chat_template(self, messages: Sequence[Any]) -> str:
        raise NotImplementedError


TOKENIZER = CharacterTokenizer()


def make_paged_backend(model: TokenModel, keys: Mapping[str, object]) -> PagedBackend:
    """On the CPU, with the reference kernels.

    Args:
        keys: of the configuration.
    """
    config = resolve_config(load_config(None, {"model.path": "none", **keys}, {}), model.spec)
    return PagedBackend(config, model, load_plugin(KERNELS, "reference").create(torch.device("cpu")))


@asynccontextmanager
async def serve_to_router(
    backend: Backend, config: ServerSection, flags: RouterFlags
) -> AsyncIterator[tuple[Router, GenerationServer]]:
    """A router that has started in front of a server."""
    async with GenerationServer(backend, TOKENIZER, config) as server:
        shards = Shards(server.targets[0])
        try:
            router = Router(shards, TOKENIZER.encode, flags)
            await router.start()
            yield router, server
        finally:
            await shards.close()
