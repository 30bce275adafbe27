"""Makes a backend from a written config; finds every part through its entry point."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from pagedkv.plugin.config import Config
from pagedkv.plugin.interface import Backend, Tokenizer
from pagedkv.plugin.registry import BACKENDS, MODELS, check_plugin_tables, create_plugin, load_plugin
from pagedkv.plugin.resolved_config import ResolvedConfig, resolve_config, resolve_model_settings
from pagedkv.plugin.threads import ThreadChoice, choose_threads, wastes_quota

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A backend that is not warmed up yet, with its config and tokenizer."""

    backend: Backend
    tokenizer: Tokenizer
    config: ResolvedConfig


def assemble(config: Config, threads: ThreadChoice | None = None) -> Assembly:
    """Loads the plugins that the config names, the model and the tokenizer. Must run on the thread that will run steps.

    Args:
        threads: None chooses for a process without others.

    Raises:
        ConfigError, PluginError, UnsupportedError: the message says what to change.
    """
    threads = threads or choose_threads(config.model.threads)
    use_threads(threads)
    settings = resolve_model_settings(config)
    check_plugin_tables(config.plugins)
    load_plugin(BACKENDS, config.backend)
    adapter = load_plugin(MODELS, settings.adapter)
    resolved = resolve_config(config, adapter.describe(settings), num_threads=threads.num_threads)
    tokenizer = adapter.load_tokenizer(settings)
    return Assembly(create_plugin(BACKENDS, config.backend, config.plugins, resolved), tokenizer, resolved)


def use_threads(choice: ThreadChoice) -> None:
    """Lets so many threads compute, in parallel regions that the calling thread enters, and logs why."""
    torch.set_num_threads(choice.num_threads)
    logger.info("threads: %d (%s)", choice.num_threads, choice.reason)
    if wastes_quota(choice):
        logger.warning(
            "threads spin while they wait for one another, and use the CPU quota up: import pagedkv before torch, or "
            "set OMP_WAIT_POLICY=PASSIVE and GOMP_SPINCOUNT=2000"
        )
