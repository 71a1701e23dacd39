"""A shorter vocabulary for a draft model: its output projection reads the rows of the first token ids only.

The ids of a byte-pair vocabulary are in the order of their merges, the most frequent first, so that the first ones are a shortlist
by frequency (FR-Spec, Zhao et al. 2025, arXiv 2502.14856, ranks them on a corpus). Only drafts can miss the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from specdec.models.decoder import Decoder
from specdec.models.layers import Linear
from specdec.quantization.layers import QuantizedLinear


def shorten_vocabulary(model: Decoder, size: int) -> None:
    """Makes a model score its first `size` token ids only, in place: its logits become [R, size]. Weights are shared, not copied.

    Any id can still be read: the embedding is left as it is. A `size` of the whole vocabulary or more changes nothing.
    """
    head = model.lm_head
    if size >= model.config.vocab_size:
        return
    with torch.device("meta"):  # room is not needed: the weights are there
        if isinstance(head, QuantizedLinear):
            shape = replace(head.shape, outputs=size)
            short: nn.Module = QuantizedLinear(shape, bias=False)
            short.blocks = head.blocks[: shape.tiles]
        else:
            short = Linear(model.config.hidden_size, size, bias=False)
            short.weight = nn.Parameter(head.weight.detach()[:size], requires_grad=False)
    model.lm_head = short
