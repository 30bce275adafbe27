"""Samples tokens from logits; shared by every backend."""

from pagedkv.plugin.sampling.prefill_logprobs import prefill_logprobs
from pagedkv.plugin.sampling.sampler import SampledToken, Sampler, SamplingRow

__all__ = ["SampledToken", "Sampler", "SamplingRow", "prefill_logprobs"]
