"""The examples in the contract's docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import pagedkv.plugin
from pagedkv.plugin import scheduler

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (pagedkv.plugin, scheduler)
    for module in pkgutil.iter_modules(package.__path__)
    if not module.ispkg
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("name", ["registry", "kv_dtypes", "attention_metadata"])
def test_the_modules_with_worked_numbers_still_have_them(name: str) -> None:
    module = importlib.import_module(f"pagedkv.plugin.{name}")
    assert doctest.testmod(module).attempted > 0
