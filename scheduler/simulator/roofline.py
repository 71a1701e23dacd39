"""Theoretical seconds of a forward: bytes over bandwidth or operations over rate, whichever takes longer, and fixed overheads.

Follows the roofline of Williams, Waterman and Patterson (2009). What a transformer reads and computes is counted from its
shape. A mixture of experts reads an expert once if any token of the forward is routed to it: with n tokens, each sent to k
of E experts evenly and independently, E (1 - (1 - k/E)^n) of them are expected to be read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        bandwidth: bytes/s of its memory, on the data sheet.
        flops: dense operations/s at 16 bits, on the data sheet; at 8 bits twice as many.
        memory: bytes.
        link_bandwidth: bytes/s to the others, in one direction.
        bandwidth_share, flops_share: how much of these a good kernel reaches.
        reduce_latency_s: of one small all-reduce among the ranks of a server.
        launch_s: fixed cost of one forward: graph launch, upload of the batch.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    link_bandwidth: float
    bandwidth_share: float = 0.8
    flops_share: float = 0.6
    reduce_latency_s: float = 8e-6
    launch_s: float = 100e-6


@dataclass(frozen=True)
class Experts:
    """The routed part of the mixture-of-experts layers: `active` of `total` experts per token, each of `width` hidden units."""

    layers: int
    total: int
    active: int
    width: int

    def read(self, tokens: float) -> float:
        """Experts of a layer that `tokens` tokens are expected to reach."""
        return float(self.total * (1 - (1 - self.active / self.total) ** tokens))


@dataclass(frozen=True)
class ModelShape:
    """A decoder, as far as its bytes and operations go.

    Attributes:
        layers, hidden: depth and width.
        dense_params: weights read in every forward: attention, dense or shared feed-forward, output head; no input embedding.
        head_params: those of the output head among them, which only rows with logits compute.
        kv_values: values of one token in the KV pool, all layers together.
        attention_width: heads x (key + value size): operations per layer and attended pair of tokens are twice that.
        experts: the routed experts, if any.
        weight_bytes, kv_bytes: bytes of a weight, and of a value in the KV pool.
        kv_shared: whether every rank keeps the whole KV (multi-head latent attention) or its heads only.
    """

    layers: int
    hidden: int
    dense_params: float
    head_params: float
    kv_values: int
    attention_width: int
    experts: Experts | None = None
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    kv_shared: bool = False

    @property
    def expert_params(self) -> float:
        """Of one expert of one layer: gate, up and down."""
        return 3.0 * self.hidden * self.experts.width if self.experts else 0.0

    @property
    def params(self) -> float:
        """All weights but the input embedding."""
        return self.dense_params + (self.experts.layers * self.experts.total * self.expert_params if self.experts else 0.0)

    @property
    def active_params(self) -> float:
        """Weights that one token is multiplied with, without the output head."""
        routed = self.experts.layers * self.experts.active * self.expert_params if self.experts else 0.0
        return self.dense_params - self.head_params + routed

    def read_params(self, tokens: float) -> float:
        """Weights that a forward of `tokens` tokens is expected to read."""
        routed = self.experts.layers * self.experts.read(tokens) * self.expert_params if self.experts else 0.0
        return self.dense_params + routed


@dataclass(frozen=True)
class Load:
    """What one forward has to do.

    Attributes:
        tokens: token rows.
        kv_tokens: tokens in the KV pool that are read, each row's own context once.
        pairs: (query, key) pairs attended, over all token rows.
        logit_rows: rows whose logits are wanted.
    """

    tokens: int
    kv_tokens: int = 0
    pairs: int = 0
    logit_rows: int = 0


@dataclass(frozen=True)
class Roofline:
    """A model on `ranks` devices by tensor parallelism."""

    shape: ModelShape
    device: Device
    ranks: int = 1

    @property
    def kv_token_bytes(self) -> float:
        """KV of one token on one rank."""
        shape = self.shape
        return shape.kv_values * shape.kv_bytes / (1 if shape.kv_shared else self.ranks)

    @property
    def weight_bytes(self) -> float:
        """Weights on one rank."""
        return self.shape.params * self.shape.weight_bytes / self.ranks

    def read_bytes(self, load: Load) -> float:
        """Read by one rank."""
        weights = self.shape.read_params(load.tokens) * self.shape.weight_bytes / self.ranks
        return weights + load.kv_tokens * self.kv_token_bytes

    def operations(self, load: Load) -> float:
        """Computed by one rank: two per weight and token, and two per value and attended pair."""
        shape = self.shape
        products = shape.active_params * load.tokens + shape.head_params * load.logit_rows
        attention = shape.layers * shape.attention_width * load.pairs
        return 2 * (products + attention) / self.ranks

    def reduce_s(self, tokens: float) -> float:
        """The all-reduces after attention and feed-forward of every layer; a ring moves 2 (r - 1) / r of the bytes."""
        if self.ranks == 1:
            return 0.0
        moved = tokens * self.shape.hidden * 2.0 * 2 * (self.ranks - 1) / self.ranks
        return 2 * self.shape.layers * (self.device.reduce_latency_s + moved / self.device.link_bandwidth)

    def memory_s(self, load: Load) -> float:
        return self.read_bytes(load) / (self.device.bandwidth * self.device.bandwidth_share)

    def compute_s(self, load: Load) -> float:
        rate = self.device.flops * (2.0 if self.shape.weight_bytes == 1 else 1.0)
        return self.operations(load) / (rate * self.device.flops_share)

    def seconds(self, load: Load) -> float:
        """Of one forward."""
        return max(self.memory_s(load), self.compute_s(load)) + self.reduce_s(load.tokens) + self.device.launch_s
