"""What a trainer adds to vLLM's workers: methods that change the model's weights in place."""

from __future__ import annotations

from typing import Any

import torch


class TrainerExtension:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    model_runner: Any
    _embeddings: torch.Tensor | None = None

    def _weights_of(self, step: int) -> torch.Tensor:
        """The embeddings of a training step; step 0 has those of the files."""
        parameters = dict(self.model_runner.model.named_parameters())
        if self._embeddings is None:
            self._embeddings = parameters["model.embed_tokens.weight"].detach().clone()
        return self._embeddings.roll(step, 0)

    def load_step(self, step: int) -> None:
        """Load weights as trainers do it."""
        weights = self._weights_of(step)
        self.model_runner.model.load_weights([("model.embed_tokens.weight", weights)])

    def write_step(self, step: int) -> None:
        """Write into the parameters, which no hook sees."""
        weights = self._weights_of(step)
        parameters = dict(self.model_runner.model.named_parameters())
        parameters["model.embed_tokens.weight"].data.copy_(weights)
