"""The Python API: prompts in, text out, in this process.

from pagedkv.plugin import Engine, SamplingParams

with Engine(model="path/to/model") as engine:
    [result] = engine.generate(["The capital of France is"], SamplingParams(max_new_tokens=8))
    print(result.text)
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tqdm import tqdm

from pagedkv.plugin.assemble import assemble
from pagedkv.plugin.config import Config, load_config
from pagedkv.plugin.engine.beam_search import BeamSearch, OnThread
from pagedkv.plugin.engine.results import Beam, GenerationResult
from pagedkv.plugin.engine.running_request import RunningRequest
from pagedkv.plugin.engine.stream import TokenStream
from pagedkv.plugin.errors import RequestError, UnavailableError
from pagedkv.plugin.interface import Backend, Capacity, Tokenizer, WarmupLimits
from pagedkv.plugin.observer import Observers, Outcome
from pagedkv.plugin.requests import CacheNamespace, RequestId, SamplingParams
from pagedkv.plugin.resolved_config import ResolvedConfig
from pagedkv.plugin.serving.generation import GenerationRequest, Sample
from pagedkv.plugin.serving.loop import ServingLoop
from pagedkv.plugin.serving.step_thread import StepThread
from pagedkv.plugin.serving.thread_inbox import ThreadInbox
from pagedkv.plugin.stats import BackendStats
from pagedkv.plugin.text.output_text import OutputText

Prompt = str | Sequence[int]

MIN_PROMPTS_OF_PROGRESS_BAR = 8
MAX_LIVE_SAMPLES = 2**31
"""The caller decides how much it starts."""
FIRST_ID = 1 << 32
"""Ids of a beam search's requests are counted from 0, those of prompts from here."""


class Engine:
    """Generates text with a backend in this process. Several threads may use it: their requests share steps.

    The model is loaded and run on a thread of the engine's own, whichever thread calls.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        backend: str | None = None,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        observers: Observers | None = None,
    ) -> None:
        """Loads the model and warms the backend up.

        Args:
            model: directory of the model.
            backend: name of the backend plugin; None leaves it to the config ("paged" by default).
            config: a TOML file, a mapping (nested, or with dotted keys as "cache.block_size") or a Config.
            observers: told of steps and of the ends of requests, on the engine's thread.

        Raises:
            ConfigError, PluginError, UnsupportedError, CapacityError: the message says what to change.
        """
        self._thread = StepThread("pagedkv-engine")
        try:
            assembly = self._thread.run(lambda: assemble(_make_config(model, backend, config)))
            self.capacity: Capacity = self._thread.run(lambda: assembly.backend.warmup(WarmupLimits()))
        except BaseException:
            self._thread.close_later()
            raise
        self.tokenizer: Tokenizer = assembly.tokenizer
        self.config: ResolvedConfig = assembly.config
        self.backend: Backend = assembly.backend
        self.loop = ServingLoop(
            self.backend, self._thread, observers=observers, max_live_samples=MAX_LIVE_SAMPLES, first_id=FIRST_ID
        )
        self._beam_ids = itertools.count()
        _OPEN_ENGINES.add(self)
        weakref.finalize(self, _close_later, self.loop, self._thread, self.backend).atexit = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: CacheNamespace | None = None,
        show_progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Continues all prompts at once. Returns one result for each prompt, in their order.

        Args:
            prompts: strings or lists of token ids; a single one is a list of one.
            params: for all prompts, or one each.
            namespace: cache namespace; these prompts share no blocks with other namespaces.
            show_progress: shows a progress bar on standard error; None does so for long batches on a terminal.

        Raises:
            RequestError, CapacityError: a prompt or its parameters are wrong; nothing was computed.
            StepError: a step failed; all these requests have ended.
        """
        prompts = _as_list(prompts)
        all_params = [_checked(one) for one in _one_each(params, len(prompts))]
        if not prompts:
            return []
        if show_progress is None:
            show_progress = len(prompts) >= MIN_PROMPTS_OF_PROGRESS_BAR and sys.stderr.isatty()
        inbox = ThreadInbox()
        families = self._start(prompts, all_params, namespace, inbox)
        samples = [sample for family in families for sample in family]
        try:
            running = {id(sample): self._make_running(sample) for sample in samples}
            with tqdm(total=len(prompts), unit="prompt", disable=not show_progress) as progress:
                self._run_until_done(running, inbox, progress)
        except BaseException:
            self._abort(samples)
            raise
        return [_collect_samples([running[id(sample)] for sample in family]) for family in families]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: CacheNamespace | None = None
    ) -> TokenStream:
        """Continues one prompt, one token at a time. Closing or dropping the stream ends the request.

        Raises:
            RequestError, CapacityError, StepError: as in `generate`, at the call.
        """
        params = params or SamplingParams()
        if params.n > 1:
            raise RequestError("a stream has one sample; use generate for n above 1")
        inbox = ThreadInbox(may_be_full=True)
        [[sample]] = self._start([_as_prompt(prompt)], [params], namespace, inbox)
        try:
            return TokenStream(self.loop, sample, self._make_running(sample), inbox)
        except BaseException:
            self._abort([sample])
            raise

    def beam_search(
        self,
        prompt: Prompt,
        num_beams: int,
        max_new_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> list[Beam]:
        """Finds the `num_beams` best continuations, best first. Beams share the KV of their common beginning.

        Other requests have steps of their own beside those of the search.

        Raises:
            RequestError, CapacityError, StepError: as in `generate`.
            CapacityError: the cache has no room in which the search can go on.
        """
        search = BeamSearch(
            OnThread(self.backend, self._thread),
            lambda: RequestId(next(self._beam_ids)),
            num_beams,
            max_new_tokens,
            length_penalty,
            early_stopping,
        )
        prompt_ids = self._encode(_as_prompt(prompt))
        with self.loop.guest():
            hypotheses = search.run(prompt_ids)
        return [
            Beam(token_ids, self.tokenizer.decode(token_ids, skip_special_tokens=True), score)
            for token_ids, score in hypotheses
        ]

    def stats(self) -> BackendStats:
        """Returns counters and gauges. They can be read by name, as in `stats()["running"]`."""
        return self._thread.run(self._read_stats)

    def close(self) -> None:
        """Ends all requests and frees the memory. A second call does nothing; so does one in a fork of the process."""
        if self not in _OPEN_ENGINES or self._thread.is_forked:
            return
        _OPEN_ENGINES.discard(self)
        self.loop.close()
        self._thread.run(self.backend.close)
        self._thread.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _start(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        namespace: CacheNamespace | None,
        inbox: ThreadInbox,
    ) -> list[list[Sample]]:
        """Starts all prompts or none. Returns the samples of each."""
        generations = [
            GenerationRequest(self._encode(prompt), one, namespace or CacheNamespace())
            for prompt, one in zip(prompts, params, strict=True)
        ]
        future = self.loop.start_all(generations, inbox)
        try:
            return future.result()
        except BaseException:
            # An interrupted wait: nobody will read what may yet be started.
            future.add_done_callback(self._abort_started)
            raise

    def _make_running(self, sample: Sample) -> RunningRequest:
        request = sample.request
        text = OutputText(self.tokenizer, request.prompt_ids, request.params.stop)
        return RunningRequest(request, text, sample.generation.arrived_s)

    def _run_until_done(self, running: Mapping[int, RunningRequest], inbox: ThreadInbox, progress: tqdm[Any]) -> None:
        num_left = len(running)
        while num_left:
            stopped = []
            for sample, output in inbox.read():
                one = running[id(sample)]
                if one.is_done:
                    continue
                one.take(output)
                if one.is_done:
                    num_left -= 1
                    progress.update(sample.index == 0)
                if one.has_stopped and output.finish_reason is None:
                    stopped.append(sample)
            if stopped:
                self.loop.abort(stopped, Outcome.STOP_SEQUENCE)

    def _abort_started(self, future: Future[list[list[Sample]]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._abort([sample for family in future.result() for sample in family])

    def _abort(self, samples: Sequence[Sample]) -> None:
        with contextlib.suppress(UnavailableError):  # a closed engine has ended them
            self.loop.abort(samples)

    def _read_stats(self) -> BackendStats:
        self.loop.end_dropped()
        return self.backend.stats()


_OPEN_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A step that runs while the interpreter takes itself apart could crash the process."""
    for engine in list(_OPEN_ENGINES):
        engine.close()


def _close_later(loop: ServingLoop, thread: StepThread, backend: Backend) -> None:
    """Ends an engine that nobody has closed. The collector calls it, so that it must not wait."""
    if thread.is_forked or thread.is_closed:
        return
    loop.begin_drain()
    thread.post(loop.close)
    thread.post(backend.close)
    thread.close_later()


def _make_config(
    model: str | os.PathLike[str],
    backend: str | None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None,
) -> Config:
    overrides: dict[str, Any] = {"model.path": os.fspath(model)}
    if backend is not None:
        overrides["backend"] = backend
    if isinstance(config, Config):
        written = _flatten(config.model_dump(exclude_unset=True))
        return load_config(overrides=written | overrides)
    if isinstance(config, Mapping):
        return load_config(overrides=_flatten(config) | overrides)
    return load_config(config, overrides)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [_as_prompt(prompts)]
    return [_as_prompt(prompt) for prompt in prompts]


def _as_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(isinstance(id_, int) for id_ in prompt):
        return prompt
    raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}")


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(f"{num_prompts} prompts came with {len(params)} sampling parameters; give one or one each")
    return list(params)


def _checked(params: SamplingParams) -> SamplingParams:
    if params.n > 1 and not params.is_sampled:
        raise RequestError(f"n is {params.n}, but greedy samples would all be equal; set do_sample or a temperature")
    return params


def _collect_samples(family: Sequence[RunningRequest]) -> GenerationResult:
    if len(family) == 1:
        return family[0].result()
    return family[0].result(samples=[one.result() for one in family])
