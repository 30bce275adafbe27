"""The requests that a plan assumes, and the blocks that they need."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one length without shared prefixes. Every prefix hit leaves room for more."""

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ConfigError("--prompt-tokens and --output-tokens are at least 1")

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def blocks_at_end(self, block_size: int) -> int:
        """Blocks of one request at its end. Its last token is never stored."""
        return -(-(self.total_tokens - 1) // block_size)

    def mean_blocks(self, block_size: int) -> float:
        """Mean blocks of one request over its steps after the prompt, that is, at a random time.

        >>> Traffic(prompt_tokens=16, output_tokens=3).mean_blocks(16)  # 16, 17, 18 tokens
        1.6666666666666667
        """
        first, last = self.prompt_tokens, self.total_tokens - 1
        return (_blocks_up_to(last, block_size) - _blocks_up_to(first - 1, block_size)) / self.output_tokens


def _blocks_up_to(num_tokens: int, block_size: int) -> int:
    """Total blocks of sequences of 1, 2, … num_tokens tokens."""
    num_full, rest = divmod(num_tokens, block_size)
    return block_size * num_full * (num_full + 1) // 2 + rest * (num_full + 1)
