"""What a model answers to requests that only the gateway's API can make, computed by transformers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ..real_router.reference import REPLACEMENT, Reference


class GatewayReference(Reference):
    """Greedy answers, log-probabilities and penalties of one checkpoint in float32."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Without special tokens, and without a character that is incomplete at the end."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.rstrip(REPLACEMENT)

    def log_probabilities(self, prompt: str, num_tokens: int) -> torch.Tensor:
        """Of the whole vocabulary at each token of the greedy answer, float32 [num_tokens, vocabulary]."""
        prompt_ids = self.tokenizer.encode(prompt)
        answer_ids = self.greedy(prompt, num_tokens)
        return self._logits([*prompt_ids, *answer_ids])[len(prompt_ids) - 1 : -1].log_softmax(-1)

    def penalized_greedy(self, prompt: str, num_tokens: int, *, frequency: float, presence: float) -> list[int]:
        """Greedy under OpenAI's penalties, which count the answer's tokens and not the prompt's."""
        ids = list(self.tokenizer.encode(prompt))
        answer_ids: list[int] = []
        for _ in range(num_tokens):
            logits = self._logits(ids)[-1]
            for token_id, count in Counter(answer_ids).items():
                logits[token_id] -= frequency * count + presence
            answer_ids.append(int(logits.argmax()))
            ids.append(answer_ids[-1])
            if answer_ids[-1] == self._model.config.eos_token_id:
                break
        return answer_ids

    def _logits(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids])).logits[0]
        return logits.float().clone()
