"""The auto kernels pick one provider that serves every layer, and say which and why."""

import logging
from dataclasses import replace

import pytest
import torch

from pagedkv.kernels import auto
from pagedkv.kernels.auto import AutoKernels
from pagedkv.kernels.cpu import provider as cpu_provider
from pagedkv.kernels.cpu.compiler import CompilerError
from pagedkv.kernels.reference import ReferenceKernels
from pagedkv.plugin.conformance.kernels import REDUCED, KernelsConformance
from pagedkv.plugin.errors import PluginError, UnsupportedError
from pagedkv.plugin.kv_dtypes import FP32, KVCacheSpec
from pagedkv.plugin.model_spec import AttentionSpec

CPU = torch.device("cpu")
NARROW = AttentionSpec(4, 4, 32, 32)
WIDE = AttentionSpec(4, 4, 256, 256)


class TestAutoKernels(KernelsConformance):
    kernels_name = "auto"
    profile = REDUCED
    dtypes = (torch.float32,)


class _Picky(ReferenceKernels):
    """Serves one head size alone."""

    head_dim = 0

    def unsupported_reasons(self, spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: torch.dtype) -> list[str]:
        return [] if spec.head_dim == self.head_dim else [f"the head size is {spec.head_dim}"]


class NarrowKernels(_Picky):
    name = "narrow"
    head_dim = 32


class WideKernels(_Picky):
    name = "wide"
    head_dim = 256


def make_auto(monkeypatch: pytest.MonkeyPatch, *kinds: type[ReferenceKernels]) -> AutoKernels:
    plugins = {kind.name: kind for kind in kinds}

    def create(_group: object, name: str, _tables: object, device: torch.device) -> ReferenceKernels:
        if name not in plugins:
            raise PluginError(f"unknown attention kernels {name!r}")
        return plugins[name].create(device)

    monkeypatch.setattr(auto, "CANDIDATES", ("narrow", "wide", "reference"))
    monkeypatch.setattr(auto, "create_plugin", create)
    return AutoKernels.create(CPU)


def ask(kernels: AutoKernels, spec: AttentionSpec) -> list[str]:
    return kernels.unsupported_reasons(spec, spec.cache_spec(16, FP32), torch.float32)


def test_the_fastest_that_serves_the_layers_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = make_auto(monkeypatch, NarrowKernels, WideKernels, ReferenceKernels)
    assert not ask(kernels, NARROW)
    assert kernels.name == "narrow"


def test_all_layers_share_one_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two providers serves one of two layers: neither may be picked."""
    kernels = make_auto(monkeypatch, NarrowKernels, WideKernels, ReferenceKernels)
    assert not ask(kernels, NARROW)
    assert not ask(kernels, WIDE)
    assert kernels.name == "reference"


def test_no_provider_for_all_layers_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = make_auto(monkeypatch, NarrowKernels, WideKernels)
    assert not ask(kernels, NARROW)
    reasons = "; ".join(ask(kernels, WIDE))
    assert "narrow: the head size is 256" in reasons
    assert "wide: the head size is 32" in reasons
    assert "reference: unknown attention kernels" in reasons
    with pytest.raises(UnsupportedError, match="wide: the head size is 32"):
        kernels.allocate(WIDE.cache_spec(16, FP32), 1)


def test_the_pick_is_final_and_logged_once_storage_is_allocated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = make_auto(monkeypatch, NarrowKernels, WideKernels, ReferenceKernels)
    ask(kernels, WIDE)
    with caplog.at_level(logging.INFO, logger=auto.__name__):
        kernels.allocate(WIDE.cache_spec(16, FP32), 1)
        kernels.allocate(WIDE.cache_spec(16, FP32), 1)
    assert [record.getMessage() for record in caplog.records] == [
        "attention kernels: wide (not narrow: the head size is 256)"
    ]
    assert ask(kernels, NARROW) == ["the head size is 32"]
    assert kernels.name == "wide"


def test_triton_is_for_gpus_alone() -> None:
    kernels = AutoKernels.create(CPU)
    assert not ask(kernels, NARROW)
    assert kernels.name in ("cpu", "reference")


def test_without_a_compiler_the_reference_is_picked_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise CompilerError("no C compiler found")

    monkeypatch.setattr(cpu_provider, "load_library", fail)
    kernels = AutoKernels.create(CPU)
    assert not ask(kernels, NARROW)
    with caplog.at_level(logging.INFO, logger=auto.__name__):
        kernels.allocate(NARROW.cache_spec(16, FP32), 1)
    assert kernels.name == "reference"
    assert "not cpu: no C compiler found" in caplog.text


def test_a_provider_that_does_not_name_a_layers_feature_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Knowing(ReferenceKernels):
        name = "wide"
        features = frozenset({"latent"})

    kernels = make_auto(monkeypatch, NarrowKernels, Knowing, ReferenceKernels)
    assert not ask(kernels, replace(NARROW, features=frozenset({"latent"})))
    assert kernels.name == "wide"
    assert "they do not name the feature 'other'" in " ".join(
        ask(kernels, replace(NARROW, features=frozenset({"other"})))
    )
