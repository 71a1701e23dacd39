"""In which form a model's weights are kept and what it computes in: the choice behind `dtype`."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import torch

from specdec.errors import ConfigError
from specdec.kernels.decoder_ops import covers
from specdec.kernels.quantized_ops import bfloat16_is_fast, quantized_is_fast
from specdec.models.config import ModelConfig

INT8, INT4, INT4_ALL = "int8", "int4", "int4-all"
AUTO_DRAFT = "auto-draft"
"""`auto` for a draft model: 4 bits for every linear layer where `auto` would quantise, since its errors cost acceptance only."""
_BF16_CAPABILITIES = ("amx_bf16", "avx512_bf16")
_LAYER_BY_LAYER = "layer by layer, several times slower than int8: the compiled forward lacks AVX512_BF16 here, or this architecture"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """How a model is kept and computed.

    Attributes:
        weights: `int8`, `int4`, `int4-all`, or the name of `dtype`.
        dtype: of activations between the products, and of float weights.
        kv_dtype: of the KV pool.
        reason: why `auto` took it, or what is amiss with what was asked for; for the user, empty where there is nothing to say.
        four_bit: linear layers that the checkpoint keeps in 4-bit blocks, taken as they are; with `int4` the others are int8, with
            `int4-all` they are rounded to 4 bits.
    """

    weights: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    reason: str = ""
    four_bit: Set[str] = frozenset()

    @property
    def quantized(self) -> bool:
        """Whether linear layers hold blocks of `specdec.quantization`."""
        return self.weights in (INT8, INT4, INT4_ALL)

    def format_of(self, layer: str) -> str:
        """The format of a quantised linear layer, such as `model.layers.0.self_attn.q_proj`."""
        return INT4 if self.weights == INT4_ALL or layer in self.four_bit else INT8

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

    @classmethod
    def int4_all(cls, four_bit: Set[str], reason: str = "") -> Precision:
        """4 bits for every linear layer: the blocks of a GGUF file as they are, all else rounded."""
        return cls(INT4_ALL, torch.float32, torch.bfloat16, reason, four_bit)


def resolve_precision(
    dtype: str | torch.dtype,
    config: ModelConfig,
    device: torch.device,
    is_fast: Callable[[], bool] = quantized_is_fast,
    four_bit: Set[str] = frozenset(),
    bfloat16_fast: Callable[[], bool] = bfloat16_is_fast,
) -> Precision:
    """What to run a model in.

    `auto` is int4 for a checkpoint in 4-bit blocks and else int8 where these are fastest: on a processor that multiplies bytes, with
    compiled kernels that run the whole decoder. Elsewhere it is bfloat16 where the checkpoint was trained in a 16-bit type and the
    device multiplies bfloat16 natively, else float32. float16 checkpoints run in bfloat16 too: their activations overflow float16 in
    some models, and CPUs emulate it.

    Args:
        dtype: an option of `EngineConfig.dtype`, AUTO_DRAFT, or a float type of torch.
        is_fast: whether quantised products are fast here; not asked unless it matters, since that may compile kernels.
        four_bit: linear layers that the checkpoint keeps in 4-bit blocks.
        bfloat16_fast: whether bfloat16 runs in the compiled forward; asked where it is wanted on the CPU.

    Raises:
        ConfigError: nothing that the decoder runs in.
    """
    if dtype in (INT8, INT4, INT4_ALL) and device.type != "cpu":
        raise ConfigError(f"dtype {dtype} runs on the CPU only, got device {device.type}: take bfloat16")
    if dtype == INT8:
        return Precision.int8()
    if dtype == INT4:
        if not four_bit:
            raise ConfigError(
                "dtype int4 keeps the 4-bit blocks of a GGUF file (Q4_0, Q4_1, Q4_K), and this model has none: take int8 or int4-all"
            )
        return Precision.int4(four_bit)
    if dtype == INT4_ALL:
        return Precision.int4_all(four_bit)
    if dtype in ("auto", AUTO_DRAFT):
        fastest = _fastest(config, device, is_fast, four_bit)
        return Precision.int4_all(four_bit, "fastest here") if dtype == AUTO_DRAFT and fastest.quantized else fastest
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in _FLOATS:
        raise ConfigError(f"dtype must be auto, int8, int4, int4-all, float32, bfloat16 or float16, got {dtype!r}")
    in_one_call = chosen != torch.bfloat16 or device.type != "cpu" or (covers(config.activation, config.head_dim) and bfloat16_fast())
    return Precision.of(chosen, "" if in_one_call else _LAYER_BY_LAYER)


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
