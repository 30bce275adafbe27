"""The quickstart in an installed environment: asks two questions of a server with each KV cache and compares."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pagedkv.integration.demo_model import ensure_demo_model
from pagedkv.integration.progress_bars import hide_progress_bars
from pagedkv.integration.serve.child_process import ChildServer, child_server
from pagedkv.integration.stream_answer import StreamSummary, TextPrinter, render_chat, stream
from pagedkv.plugin.errors import PagedKVError
from pagedkv.plugin.requests import SamplingParams

BACKENDS = ("paged", "contiguous")

SYSTEM_PROMPT = """You are the assistant of a small public library. Answer in one or two short, friendly sentences.
The library is open from Tuesday to Saturday, from ten in the morning to seven in the evening; on Thursdays until nine.
It is closed on Sundays, on Mondays and on public holidays. In August it closes at four in the afternoon.
A library card is free for everyone who lives, works or studies in the town. Children get their own card at six.
A visitor without a card may read everything in the house, use the tables, the power sockets and the wireless network.
Books are lent for four weeks, magazines for one week, films and games for two weeks, musical instruments for eight.
Every loan can be renewed twice, online or by telephone, unless somebody else has asked for the same item.
At most twenty items may be on one card at the same time, of which at most five may be films and two instruments.
A book that is lent to somebody can be reserved; a message comes when it is back, and it is kept for seven days.
Who brings an item back late pays twenty cents a day for each item, children pay nothing, nobody pays above ten euros.
A lost book is replaced by a copy in good condition, or paid for at its price when it was bought.
The quiet reading room is on the second floor. Telephones are switched off there, and food stays outside.
The children's corner is on the ground floor beside the entrance; on Saturdays at eleven somebody reads a story aloud.
The workshop in the basement has a sewing machine, a printer for plastic parts, a scanner and a bench with tools.
Who wants to use the workshop needs a short introduction, which is given on the first Wednesday of every month.
Printing costs ten cents a page in black and thirty cents in colour; scanning to a memory stick costs nothing.
The seminar room holds twelve people and can be booked by clubs and classes for two hours at a time.
Help with forms, applications and letters is given on Friday afternoons from two to five, without an appointment.
Dogs that help people are welcome everywhere; other animals wait outside, where there is water and shade.
Suggestions for new books are welcome: there is a box at the desk, and every suggestion gets an answer.
Never invent an opening time, a price or a rule that is not written here. If you do not know, say so.
"""

QUESTIONS = ("When is the library open on Thursdays?", "How much does printing cost?")

MAX_NEW_TOKENS = 48
CACHE_MEMORY = "512MiB"
"""Enough for two questions. The default, half of the free memory, takes longer to allocate than the questions take."""


class _StdoutPrinter(TextPrinter):
    """Prints the summary to standard output too, so that the order is kept in a file."""

    def show_end(self, summary: StreamSummary, text: str) -> None:
        print(f"\n   [{summary.to_text()}]", flush=True)


@dataclass(frozen=True, slots=True)
class BackendRun:
    """The summaries of both answers of one backend."""

    backend: str
    first: StreamSummary
    second: StreamSummary


def main() -> int:
    """Runs the quickstart. Returns the exit code."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    hide_progress_bars()
    try:
        print("1. The demo model, SmolLM2-135M-Instruct (made once, about a minute)", flush=True)
        model = ensure_demo_model()
        print(f"   {model}")
        with tempfile.TemporaryDirectory(prefix="pagedkv-") as folder:
            runs = [_run_backend(number, backend, model, Path(folder)) for number, backend in enumerate(BACKENDS, 2)]
    except PagedKVError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n" + compare(runs))
    return 0


def compare(runs: list[BackendRun]) -> str:
    """Returns the table that compares the backends."""
    lines = ["backend      first answer begins   second answer begins   of its prompt from the cache"]
    lines += [
        f"{run.backend:<12} {run.first.ttft_s:>15.3f} s {run.second.ttft_s:>20.3f} s "
        f"{run.second.num_cached_tokens or 0:>23} tokens"
        for run in runs
    ]
    return "\n".join(lines)


def _run_backend(number: int, backend: str, model: Path, folder: Path) -> BackendRun:
    config = folder / f"{backend}.toml"
    config.write_text(f'backend = "{backend}"\n\n[cache]\nmemory = "{CACHE_MEMORY}"\n', encoding="utf-8")
    print(f'\n{number}. A server whose config says: backend = "{backend}"', flush=True)
    arguments = [str(model), "--config", str(config), "--uds-path", str(folder / backend)]
    with child_server(arguments, folder / f"{backend}.log") as server:
        print(f"   ready on {server.target}, cache of {server.summary['max_cache_tokens']} tokens")
        answers = [_ask(server, model, question) for question in QUESTIONS]
        _show_log(server)
    return BackendRun(backend, *answers)


def _ask(server: ChildServer, model: Path, question: str) -> StreamSummary:
    print(f"\n   > {question}\n   ", end="", flush=True)
    prompt = render_chat(model, question, SYSTEM_PROMPT)
    return asyncio.run(stream(server.target, prompt, SamplingParams(max_new_tokens=MAX_NEW_TOKENS), _StdoutPrinter()))


def _show_log(server: ChildServer) -> None:
    print("\n   What the server's log says of them:")
    for line in server.log.read_text(encoding="utf-8").splitlines():
        if " ended: " in line:
            print("   " + line.partition(": ")[2])


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    # An exception runs every `with` on the way out, which stops what it started.
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
