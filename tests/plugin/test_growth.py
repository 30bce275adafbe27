"""How interfaces grow: older plugins are served, what needs an unknown feature is refused at start by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedkv.kernels.reference import ReferenceKernels
from pagedkv.plugin.abilities import HostLengths
from pagedkv.plugin.attention_metadata import AttentionMetadata
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.cache.manager import PagedCacheManager
from pagedkv.plugin.config import load_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.features import refuse_backend_without
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.plugin_names import GROUP_NAMES
from pagedkv.plugin.registry import GROUPS
from pagedkv.plugin.requests import SAMPLING_FEATURES, Request, RequestId, SamplingParams
from pagedkv.plugin.resolved_config import ResolvedConfig, resolve_config
from pagedkv.plugin.scheduler.continuous import ContinuousScheduler

Install = Callable[[str, str, type], None]
CPU = torch.device("cpu")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes classes the plugins of a group and name for this test."""
    classes: dict[tuple[str, str], type] = {}

    class Point:
        dist = None

        def __init__(self, group: str, name: str) -> None:
            self.group, self.name, self.value = group, name, f"{group}:{name}"

        def load(self) -> type:
            return classes[self.group, self.name]

    from pagedkv.plugin import registry

    found = registry.entry_points

    def entry_points(*, group: str) -> list[Any]:
        return [*found(group=group), *(Point(*key) for key in classes if key[0] == group)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    return lambda group, name, plugin: classes.__setitem__((group, name), plugin)


def make_config(**overrides: object) -> ResolvedConfig:
    values = {name.replace("__", "."): value for name, value in overrides.items()}
    written = load_config(
        None, {"model.path": "none", "cache.num_blocks": 64, "kernels.name": "reference"} | values, {}
    )
    return resolve_config(written, TokenModel().spec)


def make_backend(install: Install, model: TokenModel, **overrides: object) -> PagedBackend:
    class Model(TokenModel):
        @classmethod
        def load(cls, config: ResolvedConfig, device: torch.device) -> TokenModel:
            return model

    install("pagedkv.models", "token", Model)
    return PagedBackend.create(make_config(model__adapter="token", **overrides))


def run(backend: PagedBackend) -> list[int]:
    backend.warmup(WarmupLimits())
    backend.add([Request(RequestId(0), list(range(40)), SamplingParams(max_new_tokens=5, ignore_eos=True))])
    tokens = []
    while backend.has_unfinished():
        tokens += [output.token.token_id for output in backend.step()]
    backend.close()
    return tokens


def test_the_groups_names_stand_in_two_places_alike() -> None:
    assert tuple(group.name for group in GROUPS) == GROUP_NAMES


def test_plugins_of_version_1_without_any_new_ability_serve(install: Install) -> None:
    class OldManager(PagedCacheManager):
        interface_version = 1

    class OldScheduler(ContinuousScheduler):
        interface_version = 1

    class OldKernels(ReferenceKernels):
        interface_version = 1

    install("pagedkv.cache_managers", "old", OldManager)
    install("pagedkv.schedulers", "old", OldScheduler)
    install("pagedkv.kernels", "old", OldKernels)
    old = {"cache__manager": "old", "scheduler__name": "old", "kernels__name": "old"}
    assert run(make_backend(install, TokenModel(), **old)) == run(make_backend(install, TokenModel()))


def test_a_layer_that_needs_an_unknown_feature_is_refused_at_start_by_name(install: Install) -> None:
    model = TokenModel()
    layers = tuple(replace(layer, features=frozenset({"latent"})) for layer in model.spec.layers)
    model.spec = replace(model.spec, layers=layers)
    with pytest.raises(UnsupportedError, match=r"'reference' can't serve .* do not name the feature 'latent'"):
        make_backend(install, model)

    class Knowing(ReferenceKernels):
        features = frozenset({"latent"})

    install("pagedkv.kernels", "knowing", Knowing)
    assert len(run(make_backend(install, model, kernels__name="knowing"))) == 5


def test_a_scheduler_whose_plans_the_backend_would_misread_is_refused_at_start(install: Install) -> None:
    class Drafting(ContinuousScheduler):
        plan_features = frozenset({"draft_trees"})

    install("pagedkv.schedulers", "drafting", Drafting)
    with pytest.raises(UnsupportedError, match=r"plans of the scheduler 'drafting' need features .*: draft_trees"):
        make_backend(install, TokenModel(), scheduler__name="drafting")


class OldBackend(PagedBackend):
    interface_version = 1
    features = frozenset()


def test_a_door_whose_requests_an_older_backend_would_misread_is_refused_at_start(install: Install) -> None:
    backend = make_backend(install, TokenModel())
    refuse_backend_without(backend, SAMPLING_FEATURES, "the door")
    older = OldBackend(backend._config, backend._model, backend._kernels)
    with pytest.raises(UnsupportedError, match="the door needs features that the backend 'paged' does not name: min_"):
        refuse_backend_without(older, SAMPLING_FEATURES, "the door")


def test_every_option_that_version_1_did_not_have_is_a_feature_of_its_request() -> None:
    default = SamplingParams()
    changed = {
        "min_new_tokens": 1,
        "stop_token_ids": (3,),
        "min_p": 0.5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "raw_logprobs": True,
    }
    assert not default.features
    for option, value in changed.items():
        assert Request(RequestId(0), [1], replace(default, **{option: value})).features <= SAMPLING_FEATURES
        assert len(replace(default, **{option: value}).features) == 1


@pytest.mark.parametrize("padded_sizes", [(), (1, 4)])
def test_kernels_prepare_each_step_once_with_the_metadata_that_its_layers_get(
    install: Install, padded_sizes: tuple[int, ...]
) -> None:
    begun: list[tuple[AttentionMetadata, HostLengths]] = []
    attended: list[AttentionMetadata] = []

    class Preparing(ReferenceKernels):
        can_capture_graphs = True

        def begin_step(self, metadata: AttentionMetadata, host_lengths: HostLengths) -> None:
            begun.append((metadata, host_lengths))
            assert host_lengths.query_lens.tolist() == metadata.cu_seqlens_q.diff().tolist()
            assert host_lengths.seq_lens.tolist() == metadata.seq_lens.tolist()

        def attend(self, q, storage, metadata, options):  # type: ignore[no-untyped-def]
            attended.append(metadata)
            return super().attend(q, storage, metadata, options)

    install("pagedkv.kernels", "preparing", Preparing)
    model = TokenModel()
    backend = make_backend(install, model, kernels__name="preparing")
    backend._config = replace(backend._config, graph_batch_sizes=padded_sizes)
    backend.warmup(WarmupLimits())
    begun.clear()
    attended.clear()
    backend.add([Request(RequestId(i), list(range(20 + i)), SamplingParams(max_new_tokens=4)) for i in range(3)])
    num_steps = 0
    while backend.has_unfinished():
        backend.step()
        num_steps += 1
    assert len(begun) == num_steps
    num_layers = len(model.spec.layers)
    assert all(one is begun[index // num_layers][0] for index, one in enumerate(attended))
    if padded_sizes:
        assert begun[-1][1].query_lens.tolist() == [1, 1, 1, 1]
    backend.close()
