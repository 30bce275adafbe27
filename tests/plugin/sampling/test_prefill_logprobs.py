"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

import pytest
import torch

from pagedkv.plugin.sampling import prefill_logprobs
from pagedkv.plugin.sampling.chunks import max_rows_at_once

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 65])
def test_log_softmax_at_the_next_token(num_tokens: int, dtype: torch.dtype) -> None:
    vocab_size = 20_000  # several chunks of rows
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(num_tokens, vocab_size, generator=generator) * 5).to(dtype)
    next_ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    found = prefill_logprobs(logits, next_ids)
    assert found.dtype == torch.float32
    expected = logits.double().log_softmax(-1).gather(1, next_ids[:, None]).squeeze(1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_chunks_bound_the_temporaries() -> None:
    assert max_rows_at_once(20_000, CPU) * 20_000 <= 2**19
    assert max_rows_at_once(20_000, CPU) < 65
    assert max_rows_at_once(2**30, CPU) == 1
