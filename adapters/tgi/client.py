"""A client of `generate.v3` for one prompt at a time. Makes the calls in a router's order: Prefill, then Decode."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from pagedkv.adapters.rpc.tls import ClientTls, read_client_credentials
from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.answers import CACHED_TOKENS_METADATA, REFUSED_METADATA
from pagedkv.adapters.tgi.convert import FINISH_REASONS, FinalText
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.adapters.tgi.status import read_error, read_refusal
from pagedkv.plugin.config import DEFAULT_MAX_MESSAGE_BYTES
from pagedkv.plugin.requests import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Self

_Response = TypeVar("_Response")

KEEP_ALL_TOKENS = 2**32 - 1
"""Value of `truncate` that keeps the whole prompt."""

_CLEAR_TIMEOUT_S = 5.0
_EMPTY_ANSWER_PAUSE_S = 0.002
_FINISH_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token as it arrives."""

    token_id: int
    text: str
    """Empty while the last character is incomplete."""
    logprob: float
    is_special: bool
    num_cached_tokens: int | None
    """Prompt tokens found in the server's prefix cache. Set in the first token; None elsewhere or if not reported."""
    final: FinalText | None
    """Set in the last token only."""


class GenerationClient:
    """A client of one model server.

        async with GenerationClient("unix:/run/pagedkv-0") as client:
            async for token in client.generate("Once upon a time", SamplingParams(max_new_tokens=20)):
                print(token.text, end="")

    Every method raises the error that matches the server's status: RequestError, NotFoundError, UnavailableError (also
    when no server answers at the address), or PagedKVError for any other.

    Args:
        target: "unix:PATH", "HOST:PORT", or the path of a socket.
        tls: for a server that listens on TCP with TLS; None connects without encryption.
        metadata: sent with each new request, for example the cache salt of a tenant.

    Raises:
        ConfigError: a file of `tls` can't be read or is not a PEM file of its kind.
    """

    def __init__(self, target: str, *, tls: ClientTls | None = None, metadata: Sequence[tuple[str, str]] = ()) -> None:
        options = [("grpc.max_receive_message_length", DEFAULT_MAX_MESSAGE_BYTES)]
        address = _resolve_target(target)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, read_client_credentials(tls), options=options)
        self._metadata = tuple(metadata)
        self._stub = TextGenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def info(self) -> pb.InfoResponse:
        return await _answer_of(self._stub.Info(pb.InfoRequest()))

    async def health(self) -> None:
        """Returns if the server takes new requests; raises otherwise."""
        await _answer_of(self._stub.Health(pb.HealthRequest()))

    async def generate(
        self,
        prompt: str,
        params: SamplingParams,
        *,
        truncate: int = KEEP_ALL_TOKENS,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[GeneratedToken, None]:
        """Streams the tokens of one prompt. Ignores `params.n`.

        A caller that stops early, by cancellation or by `aclose` (see `contextlib.aclosing`), ends the request on the
        server before this returns.
        """
        batch_id = secrets.randbits(63)
        request = _to_message(batch_id, prompt, params, truncate, add_special_tokens)
        prefill = pb.PrefillRequest(batch=pb.Batch(id=batch_id, requests=[request], size=1))
        is_over = False
        try:
            call = self._stub.Prefill(prefill, metadata=self._metadata)
            response = await _answer_of(call)
            while True:
                is_over = not response.HasField("batch")
                num_cached_tokens = await _read_trailers(call, response)
                for generation in response.generations:
                    yield _read_token(generation, num_cached_tokens)
                if is_over:
                    return
                if not response.generations:
                    await asyncio.sleep(_EMPTY_ANSWER_PAUSE_S)
                call = self._stub.Decode(pb.DecodeRequest(batches=[response.batch]), metadata=self._metadata)
                response = await _answer_of(call)
        finally:
            if not is_over:
                await asyncio.shield(self._clear(batch_id))

    async def _clear(self, batch_id: int) -> None:
        try:
            await self._stub.ClearCache(
                pb.ClearCacheRequest(id=batch_id), timeout=_CLEAR_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return  # A server that can't be reached, or has stopped, holds no request of ours.


def _resolve_target(target: str) -> str:
    is_path = "/" in target and not target.startswith(("unix:", "dns:", "ipv4:", "ipv6:"))
    return f"unix:{os.path.abspath(target)}" if is_path else target


def _to_message(
    request_id: int, prompt: str, params: SamplingParams, truncate: int, add_special_tokens: bool
) -> pb.Request:
    return pb.Request(
        id=request_id,
        inputs=prompt,
        input_chunks=pb.Input(chunks=[pb.InputChunk(text=prompt)]),
        truncate=truncate,
        add_special_tokens=add_special_tokens,
        parameters=pb.NextTokenChooserParameters(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            typical_p=params.typical_p,
            do_sample=params.do_sample,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.relative_frequency_penalty,
            watermark=params.watermark,
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(
            max_new_tokens=params.max_new_tokens,
            stop_sequences=params.stop,
            ignore_eos_token=params.ignore_eos,
        ),
        prefill_logprobs=params.prefill_logprobs,
        top_n_tokens=params.top_n_tokens,
    )


async def _answer_of(call: grpc.aio.UnaryUnaryCall[Any, _Response]) -> _Response:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise read_error(error.code(), error.details() or error.code().name) from None


async def _read_trailers(
    call: grpc.aio.UnaryUnaryCall[Any, Any], response: pb.PrefillResponse | pb.DecodeResponse
) -> int | None:
    """The number of cached tokens, where the metadata has it. Raises if it says that the request was refused."""
    num_cached_tokens = None
    for key, value in await call.trailing_metadata() or ():
        detail = str(value).partition("=")[2]
        if key == CACHED_TOKENS_METADATA:
            num_cached_tokens = int(detail)
        if key == REFUSED_METADATA:
            text = "".join(text for generation in response.generations for text in generation.tokens.texts).strip()
            raise read_refusal(detail, text)
    return num_cached_tokens


def _read_token(generation: pb.Generation, num_cached_tokens: int | None) -> GeneratedToken:
    tokens = generation.tokens
    final = None
    if generation.HasField("generated_text"):
        text = generation.generated_text
        final = FinalText(text.text, text.generated_tokens, _FINISH_REASONS[text.finish_reason])
    return GeneratedToken(
        tokens.ids[0], tokens.texts[0], tokens.logprobs[0], tokens.is_special[0], num_cached_tokens, final
    )
