"""`pagedkv up`: OpenAI's API on this machine: workers and the SMG gateway in one command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.integration.cli.options import AsJson, ConfigFile, Settings, parse_settings
from pagedkv.plugin.errors import ConfigError

if TYPE_CHECKING:
    from pagedkv.integration.serve.local_deployment import DeploymentSummary

DEFAULT_PORT = 30000
"""The gateway's own."""


def up(
    model: Annotated[str, typer.Argument(help="Directory of the model.", show_default=False)],
    gateway_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- [SMG ARGUMENTS]", help="More arguments of `smg launch`.", show_default=False),
    ] = None,
    replicas: Annotated[
        int, typer.Option("--replicas", "-n", min=1, help="Workers, each with a copy of the model and its own cache.")
    ] = 1,
    host: Annotated[str, typer.Option(help="Address of the API; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the API.")] = DEFAULT_PORT,
    policy: Annotated[str, typer.Option(help="How the gateway chooses a worker, as of `smg launch`.")] = "cache_aware",
    gateway: Annotated[
        str | None,
        typer.Option(metavar="PROGRAM", help="The gateway, where smg is neither beside pagedkv nor on the PATH."),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Serve MODEL with OpenAI's and Anthropic's API over HTTP, until SIGTERM or Ctrl-C.

    Starts workers (`pagedkv serve --protocol smg`) and the SMG gateway in front of them, starts again what ends, and
    lets running answers finish at the end; a second signal ends all at once.
    """
    from pagedkv.integration.serve.local_deployment import OWN_KEYS, OWN_SETTINGS, DeploymentOptions, run_deployment
    from pagedkv.integration.serve.smg_gateway import SmgGateway, find_gateway_program
    from pagedkv.plugin.config import load_config

    overrides = parse_settings(settings)
    for key in OWN_KEYS:
        if key in overrides:
            raise ConfigError(f"--set {key}: pagedkv up chooses it; --host and --port are the address of the API")

    def announce(summary: DeploymentSummary) -> None:
        print(summary.to_json() if as_json else summary.to_text(), flush=True)

    options = DeploymentOptions(
        config=load_config(config, {**overrides, **OWN_SETTINGS, "model.path": model}),
        config_file=config,
        settings=settings or (),
        num_replicas=replicas,
        gateway=SmgGateway(find_gateway_program(gateway), host, port, policy, gateway_arguments or ()),
    )
    raise typer.Exit(run_deployment(options, announce))
