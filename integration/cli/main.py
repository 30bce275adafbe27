"""The command `pagedkv`. Each subcommand has its own module and imports heavy libraries only when it runs."""

from __future__ import annotations

import sys

import typer

from pagedkv.integration.cli.bench import BenchCommand, bench
from pagedkv.integration.cli.calibrate import calibrate
from pagedkv.integration.cli.check_server import check_server
from pagedkv.integration.cli.config import config
from pagedkv.integration.cli.demo_model import demo_model
from pagedkv.integration.cli.eval_kv import eval_kv
from pagedkv.integration.cli.export_chat_template import export_chat_template
from pagedkv.integration.cli.generate import generate
from pagedkv.integration.cli.install_launcher_shim import install_launcher_shim
from pagedkv.integration.cli.plan import plan
from pagedkv.integration.cli.plugins import plugins
from pagedkv.integration.cli.serve import serve
from pagedkv.integration.cli.up import up
from pagedkv.integration.progress_bars import hide_progress_bars
from pagedkv.plugin.errors import PagedKVError
from pagedkv.plugin.threads import spare_quota

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="A paged, prefix-sharing KV cache behind a gRPC model server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    serve,
    up,
    generate,
    demo_model,
    plan,
    plugins,
    config,
    calibrate,
    eval_kv,
    install_launcher_shim,
    export_chat_template,
    check_server,
):
    app.command()(command)
app.command(cls=BenchCommand)(bench)


def run() -> None:
    """Runs the command line. Prints a PagedKVError as one paragraph on standard error, without a traceback."""
    spare_quota()  # before a command loads torch
    hide_progress_bars()
    try:
        app()
    except PagedKVError as error:
        print(f"pagedkv: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
