"""Streams one answer of a server to a terminal or a program: for `pagedkv generate` and the quickstart."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pagedkv.plugin.requests import SamplingParams

if TYPE_CHECKING:
    from pagedkv.adapters.tgi.client import GeneratedToken

TlsFiles: TypeAlias = "tuple[Path | None, Path | None, Path | None]"
"""Files of authorities, certificate and key, as for `ClientTls`."""


def render_chat(model: Path, message: str, system: str | None = None) -> str:
    """Renders the prompt of one user message with the chat template of the model in a directory.

    Raises:
        ConfigError: the directory has no model.
        RequestError: the model has no chat template.
    """
    from pagedkv.plugin.config import parse_config
    from pagedkv.plugin.registry import MODELS, load_plugin
    from pagedkv.plugin.resolved_config import resolve_model_settings

    settings = resolve_model_settings(parse_config({"model": {"path": str(model)}}))
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": message})
    return load_plugin(MODELS, settings.adapter).load_tokenizer(settings).apply_chat_template(messages)


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """Tokens and times of one answer, measured by its client."""

    num_generated_tokens: int
    num_cached_tokens: int | None
    """Prompt tokens that the server found in its prefix cache; None if it does not report them."""
    finish_reason: str
    ttft_s: float
    tpot_s: float | None
    """Mean time per output token after the first, in seconds; None for an answer of one token."""

    def to_text(self) -> str:
        parts = [f"{self.num_generated_tokens} tokens ({self.finish_reason})", f"first after {self.ttft_s:.3f} s"]
        if self.tpot_s is not None:
            parts.append(f"then {self.tpot_s * 1000:.1f} ms a token")
        if self.num_cached_tokens is not None:
            parts.append(f"{self.num_cached_tokens} prompt tokens from the prefix cache")
        return ", ".join(parts)


class StreamPrinter(Protocol):
    """Prints one answer as it arrives."""

    def show_token(self, token: GeneratedToken) -> None: ...

    def show_end(self, summary: StreamSummary, text: str) -> None: ...


class TextPrinter:
    """Prints the answer to standard output as it arrives, and its summary to standard error."""

    def show_token(self, token: GeneratedToken) -> None:
        if not token.is_special:
            print(token.text, end="", flush=True)

    def show_end(self, summary: StreamSummary, text: str) -> None:
        print(flush=True)
        print(summary.to_text(), file=sys.stderr)


class JsonPrinter:
    """Prints one JSON object a line: one for each token, then one for the end."""

    def show_token(self, token: GeneratedToken) -> None:
        self._print(
            "token", token_id=token.token_id, text=token.text, logprob=token.logprob, is_special=token.is_special
        )

    def show_end(self, summary: StreamSummary, text: str) -> None:
        self._print(
            "end",
            text=text,
            finish_reason=summary.finish_reason,
            num_generated_tokens=summary.num_generated_tokens,
            num_cached_tokens=summary.num_cached_tokens,
            ttft_s=summary.ttft_s,
            tpot_s=summary.tpot_s,
        )

    def _print(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), flush=True)


async def stream(
    target: str, prompt: str, params: SamplingParams, printer: StreamPrinter, tls_files: TlsFiles | None = None
) -> StreamSummary:
    """Streams one answer into a printer and returns its summary.

    Raises:
        PagedKVError: as `GenerationClient` does.
    """
    from pagedkv.adapters.rpc.tls import ClientTls
    from pagedkv.adapters.tgi.client import GenerationClient

    tls = None if tls_files is None else ClientTls(*tls_files)
    started_s = time.perf_counter()
    first_s: float | None = None
    num_cached_tokens: int | None = None
    async with (
        GenerationClient(target, tls=tls) as client,
        contextlib.aclosing(client.generate(prompt, params)) as tokens,
    ):
        async for token in tokens:
            if first_s is None:
                first_s, num_cached_tokens = time.perf_counter(), token.num_cached_tokens
            printer.show_token(token)
            last = token
    ended_s = time.perf_counter()
    final = last.final
    assert final is not None
    assert first_s is not None
    num_gaps = final.num_generated_tokens - 1
    summary = StreamSummary(
        final.num_generated_tokens,
        num_cached_tokens,
        final.finish_reason.value,
        first_s - started_s,
        (ended_s - first_s) / num_gaps if num_gaps else None,
    )
    printer.show_end(summary, final.text)
    return summary
