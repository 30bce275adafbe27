"""`pagedkv generate`: a gRPC client that streams one answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

import typer

from pagedkv.integration.cli.options import AsJson
from pagedkv.integration.cli.serve import DEFAULT_ADDRESS
from pagedkv.plugin.errors import ConfigError, PagedKVError
from pagedkv.plugin.requests import SamplingParams

if TYPE_CHECKING:
    from pagedkv.adapters.tgi.client import GeneratedToken

TlsFiles: TypeAlias = "tuple[Path | None, Path | None, Path | None]"
"""Files of authorities, certificate and key, as for `ClientTls`."""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def generate(
    prompt: Annotated[str, typer.Argument(help='What to continue; "-" reads standard input.')],
    target: Annotated[
        str, typer.Option(metavar="ADDR", help="The server: HOST:PORT, unix:PATH, or a socket's path.")
    ] = DEFAULT_ADDRESS,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="Above 0; 1 is neutral. Any other value samples.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k best tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the best tokens of this mass; 1 is off.")] = 1.0,
    typical_p: Annotated[float, typer.Option(help="Sample from the most typical tokens of this mass; 1 is off.")] = 1.0,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample instead of taking the best token.")] = False,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled answer.", show_default=False)] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 avoids tokens that were there.")] = 1.0,
    frequency_penalty: Annotated[float, typer.Option(help="Above 0 avoids frequent tokens.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End after this text; several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to the longest answer.")] = False,
    chat: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Send PROMPT as a chat message, by the chat template of the model in DIR."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message; needs --chat.")] = None,
    use_tls: Annotated[bool, typer.Option("--tls", help="Connect with TLS; any --tls-… option does, too.")] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM of who signs the server's certificate.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM of our certificate, for a server that asks for one.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM of its key.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send PROMPT to a server and stream its answer. Ctrl-C ends it there too, and frees its blocks."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if system is not None and chat is None:
        raise ConfigError("--system needs --chat DIR: a server takes plain text, so the chat template is applied here")
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        typical_p=typical_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        relative_frequency_penalty=frequency_penalty,
    )
    if chat is not None:
        text = render_chat(chat, text, system)
    tls_files = (tls_ca, tls_cert, tls_key) if use_tls or tls_ca or tls_cert or tls_key else None
    try:
        asyncio.run(_generate(target, tls_files, text, params, JsonPrinter() if as_json else TextPrinter()))
    except asyncio.CancelledError:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except PagedKVError as error:
        print(f"pagedkv: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None


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


async def _generate(
    target: str, tls_files: TlsFiles | None, prompt: str, params: SamplingParams, printer: StreamPrinter
) -> StreamSummary:
    task = asyncio.current_task()
    assert task is not None
    # asyncio's own handling of Ctrl-C differs between Python versions; a cancelled task ends its request everywhere.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    return await stream(target, prompt, params, printer, tls_files)


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
