from __future__ import annotations

import pytest

from pagedkv.integration.measure.plan.plot import curve, lengths_up_to
from pagedkv.integration.measure.plan.traffic import Traffic
from pagedkv.plugin.errors import ConfigError


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (16, 1), (16, 2), (5, 40), (100, 64), (33, 17)])
def test_mean_blocks_are_those_of_each_step_averaged(prompt: int, output: int) -> None:
    steps = [-(-(prompt + step) // 16) for step in range(output)]
    traffic = Traffic(prompt, output)
    assert traffic.mean_blocks(16) == pytest.approx(sum(steps) / len(steps))
    assert traffic.blocks_at_end(16) == steps[-1]


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Traffic(0, 5)


def test_the_curve_falls_with_length_in_whole_blocks() -> None:
    lengths = lengths_up_to(100)
    assert lengths == [32, 64, 100]
    assert curve(100, 16, lengths) == [50, 25, 14]
