"""The Python API: prompts in, text out, in this process.

from pagedkv.plugin import Engine, SamplingParams

with Engine(model="path/to/model") as engine:
    [result] = engine.generate(["The capital of France is"], SamplingParams(max_new_tokens=8))
    print(result.text)
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from pagedkv.plugin.assemble import assemble
from pagedkv.plugin.config import Config, load_config
from pagedkv.plugin.engine.beam_search import BeamSearch
from pagedkv.plugin.engine.results import Beam, GenerationResult
from pagedkv.plugin.engine.running_request import RunningRequest
from pagedkv.plugin.engine.stream import TokenStream
from pagedkv.plugin.errors import RequestError, StepError
from pagedkv.plugin.interface import Backend, Capacity, Tokenizer, WarmupLimits
from pagedkv.plugin.requests import CacheNamespace, Request, RequestId, SamplingParams
from pagedkv.plugin.resolved_config import ResolvedConfig
from pagedkv.plugin.stats import BackendStats
from pagedkv.plugin.text.output_text import OutputText

Prompt = str | Sequence[int]

MIN_PROMPTS_OF_PROGRESS_BAR = 8


class Engine:
    """Generates text with a backend in this process. Several threads may use it: their requests share steps."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        backend: str | None = None,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    ) -> None:
        """Loads the model and warms the backend up.

        Args:
            model: directory of the model.
            backend: name of the backend plugin; None leaves it to the config ("paged" by default).
            config: a TOML file, a mapping (nested, or with dotted keys as "cache.block_size") or a Config.

        Raises:
            ConfigError, PluginError, UnsupportedError, CapacityError: the message says what to change.
        """
        assembly = assemble(_make_config(model, backend, config))
        self.tokenizer: Tokenizer = assembly.tokenizer
        self.config: ResolvedConfig = assembly.config
        self.backend: Backend = assembly.backend
        self.capacity: Capacity = self.backend.warmup(WarmupLimits())
        self._running: dict[RequestId, RunningRequest] = {}
        self._ids = itertools.count()
        self._lock = threading.RLock()

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
        all_params = _one_each(params, len(prompts))
        with self._lock:
            parents = self._add(prompts, all_params, namespace)
        if show_progress is None:
            show_progress = len(prompts) >= MIN_PROMPTS_OF_PROGRESS_BAR and sys.stderr.isatty()
        requests, samples = list(parents), [[parent] for parent in parents]
        try:
            with tqdm(total=len(parents), unit="prompt", disable=not show_progress) as progress:
                for parent, family in zip(parents, samples, strict=True):
                    if parent.request.params.n > 1:
                        self._run_until_first_token(parent)
                        family += self._fork_samples(parent)
                        requests += family[1:]
                self._run_until_done(requests, progress, parents)
        except BaseException:
            self._abort(requests)
            raise
        return [_collect_samples(family) for family in samples]

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
        with self._lock:
            [running] = self._add([_as_prompt(prompt)], [params], namespace)
        return TokenStream(running, self._step, self._abort)

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

        Other threads' requests wait until the search ends.

        Raises:
            RequestError, CapacityError, StepError: as in `generate`.
        """
        search = BeamSearch(
            self.backend,
            lambda: RequestId(next(self._ids)),
            num_beams,
            max_new_tokens,
            length_penalty,
            early_stopping,
        )
        prompt_ids = self._encode(_as_prompt(prompt))
        with self._lock:
            hypotheses = search.run(prompt_ids)
        return [
            Beam(token_ids, self.tokenizer.decode(token_ids, skip_special_tokens=True), score)
            for token_ids, score in hypotheses
        ]

    def stats(self) -> BackendStats:
        """Returns counters and gauges. They can be read by name, as in `stats()["running"]`."""
        with self._lock:
            return self.backend.stats()

    def close(self) -> None:
        """Ends all requests and frees the memory. A second call does nothing."""
        with self._lock:
            self.backend.close()
            self._running.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _add(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], namespace: CacheNamespace | None
    ) -> list[RunningRequest]:
        requests = [
            Request(RequestId(next(self._ids)), self._encode(prompt), _with_seed(one), namespace or CacheNamespace())
            for prompt, one in zip(prompts, params, strict=True)
        ]
        return self._add_requests(requests)

    def _add_requests(self, requests: Sequence[Request]) -> list[RunningRequest]:
        self.backend.add(requests)
        running = [
            RunningRequest(request, OutputText(self.tokenizer, request.prompt_ids, request.params.stop))
            for request in requests
        ]
        self._running.update((one.request.id, one) for one in running)
        return running

    def _fork_samples(self, parent: RunningRequest) -> list[RunningRequest]:
        """Adds the other samples of a prompt that has been computed. They share its blocks."""
        params, seed = parent.request.params, parent.request.params.seed
        assert seed is not None
        with self._lock:
            return self._add_requests(
                [
                    Request(
                        RequestId(next(self._ids)),
                        parent.request.prompt_ids,
                        replace(params, seed=(seed + index) % 2**64),
                        parent.request.namespace,
                        parent_id=parent.request.id,
                    )
                    for index in range(1, params.n)
                ]
            )

    def _run_until_first_token(self, running: RunningRequest) -> None:
        while not running.outputs and not running.error:
            self._step()
        if running.error:
            raise running.error

    def _run_until_done(
        self, requests: Iterable[RunningRequest], progress: tqdm[Any], counted: Sequence[RunningRequest]
    ) -> None:
        for running in requests:
            while not running.is_done:
                self._step()
                progress.update(sum(one.is_done for one in counted) - progress.n)
            if running.error:
                raise running.error

    def _step(self, unless: RunningRequest | None = None) -> None:
        """Runs one step and passes its tokens to their requests.

        Does nothing if `unless` got a token while another thread ran a step.
        """
        with self._lock:
            if unless and (unless.pieces or unless.is_done):
                return
            try:
                outputs = self.backend.step()
            except StepError as error:
                for id_ in error.request_ids & self._running.keys():
                    self._running.pop(RequestId(id_)).error = error
                return
            for output in outputs:
                self._running[output.request_id].take(output)
            done = [output.request_id for output in outputs if self._running[output.request_id].is_done]
            self.backend.abort([id_ for id_ in done if self._running[id_].has_stopped])
            for id_ in done:
                del self._running[id_]

    def _abort(self, requests: Collection[RunningRequest]) -> None:
        with self._lock:
            ids = [one.request.id for one in requests if one.request.id in self._running]
            if ids:
                self.backend.abort(ids)
            for id_ in ids:
                del self._running[id_]


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


def _with_seed(params: SamplingParams) -> SamplingParams:
    """Sets a random seed if there is none: samples of one prompt use consecutive seeds, so the first must be known."""
    if params.n == 1:
        return params
    if not params.is_sampled:
        raise RequestError(f"n is {params.n}, but greedy samples would all be equal; set do_sample or a temperature")
    return params if params.seed is not None else replace(params, seed=secrets.randbits(64))


def _collect_samples(family: Sequence[RunningRequest]) -> GenerationResult:
    if len(family) == 1:
        return family[0].result()
    return family[0].result(samples=[one.result() for one in family])
