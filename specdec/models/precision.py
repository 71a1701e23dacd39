"""In which form a model's weights are kept and what it computes in: the choice behind `dtype`."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import torch

from specdec.errors import ConfigError
from specdec.kernels.decoder_ops import covers
from specdec.kernels.quantized_ops import quantized_is_fast
from specdec.models.config import ModelConfig

INT8, INT4 = "int8", "int4"
_BF16_CAPABILITIES = ("amx_bf16", "avx512_bf16")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """How a model is kept and computed.

    Attributes:
        weights: `int8`, `int4`, or the name of `dtype`.
        dtype: of activations between the products, and of float weights.
        kv_dtype: of the KV pool.
        reason: why `auto` took it, for the user; empty where it was asked for.
        four_bit: with `int4`, the linear layers that are; the others are int8.
    """

    weights: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    reason: str = ""
    four_bit: Set[str] = frozenset()

    @property
    def quantized(self) -> bool:
        """Whether linear layers hold blocks of `specdec.quantization`."""
        return self.weights in (INT8, INT4)

    def format_of(self, layer: str) -> str:
        """The format of a quantised linear layer, such as `model.layers.0.self_attn.q_proj`."""
        return INT4 if layer in self.four_bit else INT8

    @classmethod
    def of(cls, dtype: torch.dtype, reason: str = "") -> Precision:
        """Everything in one float type."""
        return cls(_name(dtype), dtype, dtype, reason)

    @classmethod
    def int8(cls, reason: str = "") -> Precision:
        """Weights in int8; float32 between the products, as their activations are quantised afresh; KV in bfloat16."""
        return cls(INT8, torch.float32, torch.bfloat16, reason)

    @classmethod
    def int4(cls, four_bit: Set[str], reason: str = "") -> Precision:
        """The 4-bit blocks of a GGUF file as they are, all else as with int8."""
        return cls(INT4, torch.float32, torch.bfloat16, reason, four_bit)


def resolve_precision(
    dtype: str | torch.dtype,
    config: ModelConfig,
    device: torch.device,
    is_fast: Callable[[], bool] = quantized_is_fast,
    four_bit: Set[str] = frozenset(),
) -> Precision:
    """What to run a model in.

    `auto` is int4 for a checkpoint in 4-bit blocks and else int8 where these are fastest: on a processor that multiplies bytes, with
    compiled kernels that run the whole decoder. Elsewhere it is bfloat16 where the checkpoint was trained in a 16-bit type and the
    device multiplies bfloat16 natively, else float32. float16 checkpoints run in bfloat16 too: their activations overflow float16 in
    some models, and CPUs emulate it.

    Args:
        dtype: an option of `EngineConfig.dtype`, or a float type of torch.
        is_fast: whether quantised products are fast here; not asked unless it matters, since that may compile kernels.
        four_bit: linear layers that the checkpoint keeps in 4-bit blocks.

    Raises:
        ConfigError: nothing that the decoder runs in.
    """
    if dtype in (INT8, INT4) and device.type != "cpu":
        raise ConfigError(f"dtype {dtype} runs on the CPU only, got device {device.type}: take bfloat16")
    if dtype == INT8:
        return Precision.int8()
    if dtype == INT4:
        if not four_bit:
            raise ConfigError("dtype int4 keeps the 4-bit blocks of a GGUF file (Q4_0, Q4_1, Q4_K), and this model has none: take int8")
        return Precision.int4(four_bit)
    if dtype == "auto":
        return _fastest(config, device, is_fast, four_bit)
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in _FLOATS:
        raise ConfigError(f"dtype must be auto, int8, int4, float32, bfloat16 or float16, got {dtype!r}")
    return Precision.of(chosen)


def _fastest(config: ModelConfig, device: torch.device, is_fast: Callable[[], bool], four_bit: Set[str]) -> Precision:
    own = torch.bfloat16 if config.torch_dtype in ("bfloat16", "float16") else torch.float32
    if device.type != "cpu":
        return Precision.of(own)
    native = any(torch.cpu.get_capabilities().get(name) for name in _BF16_CAPABILITIES)
    best_float = own if native else torch.float32
    if not covers(config.activation, config.head_dim):
        return Precision.of(best_float, "int8 and int4 have no kernels for this architecture")
    if not is_fast():
        return Precision.of(best_float, "int8 and int4 would need compiled kernels and AVX-512 VNNI")
    if four_bit:
        return Precision.int4(four_bit, "fastest here, and the file's own 4-bit weights")
    return Precision.int8(f"fastest here; --dtype {_name(own)} for the checkpoint's own precision")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
