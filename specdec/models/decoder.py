"""The decoder: one module for Llama, Mistral, Qwen2, Qwen3 and Gemma 3, its parameters named as in their checkpoints.

It owns no KV and does no masking: `attend` does. Loading is in loading.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.backend.base import Attend, AttentionSpec
from specdec.models.config import ModelConfig
from specdec.models.layers import DecoderLayer, Embedding, Linear, RMSNorm
from specdec.models.rotary import RotaryTables


class _Body(nn.Module):
    """What checkpoints call `model`: embeddings, layers and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)


class Decoder(nn.Module):
    """A causal language model over packed token rows.

    Args:
        config: the architecture.
        max_positions: positions lie below this; None takes the model's own limit.
    """

    def __init__(self, config: ModelConfig, max_positions: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryTables(config.ropes, max_positions or config.max_position_embeddings)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the output projection use the embedding's weight, where the architecture says so and a pass has not replaced them."""
        if self.config.tie_word_embeddings and isinstance(self.lm_head, nn.Linear):
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One per layer."""
        return self.config.attention_specs

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, capture: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """
        Args:
            tokens: int64 [T].
            positions: int64 [T], each token's position in its own sequence.
            attend: the backend's attention for this batch.
            capture: layers whose output to return.

        Returns:
            hidden states after the final norm, [T, hidden], and the residual stream after each captured layer, [T, hidden].
        """
        rotations = self.rotary.rotations(positions)
        x = self.model.embed_tokens(tokens)  # [T, hidden]
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype, device=x.device)  # rounded to x's dtype, as Gemma does
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rotations[self.config.layer_ropes[index]], attend)
            if index in capture:
                captured[index] = x
        return self.model.norm(x), captured

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocabulary] of hidden states [R, hidden] after the final norm."""
        logits: Tensor = self.lm_head(hidden).float()
        cap = self.config.logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap else logits
