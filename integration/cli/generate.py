"""`pagedkv generate`: a gRPC client that streams one answer."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.integration.cli.options import AsJson
from pagedkv.integration.cli.serve import DEFAULT_ADDRESS
from pagedkv.integration.stream_answer import (
    JsonPrinter,
    StreamPrinter,
    StreamSummary,
    TextPrinter,
    TlsFiles,
    render_chat,
    stream,
)
from pagedkv.plugin.errors import ConfigError, PagedKVError
from pagedkv.plugin.requests import SamplingParams

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


async def _generate(
    target: str, tls_files: TlsFiles | None, prompt: str, params: SamplingParams, printer: StreamPrinter
) -> StreamSummary:
    task = asyncio.current_task()
    assert task is not None
    # asyncio's own handling of Ctrl-C differs between Python versions; a cancelled task ends its request everywhere.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    return await stream(target, prompt, params, printer, tls_files)
