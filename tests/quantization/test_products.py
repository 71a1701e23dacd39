"""Products of quantised weights: the kernels against the reference, quantisation error, and rows that do not depend on each other."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from specdec.kernels import build
from specdec.kernels.quantized_ops import quantized_linear
from specdec.quantization import int4, int8
from specdec.quantization.blocks import FORMATS, GROUP, PART, BlockShape
from specdec.quantization.layers import QuantizedEmbedding, QuantizedLinear, quantize_linears
from specdec.quantization.reference import dequantize, linear_reference

SHAPES = [(64, 128), (32, 256), (33, 130), (96, 576), (7, 12), (100, 52), (5, 3)]
BY_FORMAT = pytest.mark.parametrize("kind", FORMATS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def four_bit(outputs: int, inputs: int) -> int4.Parts:
    """Nibbles of all values, scales, and minima of both signs."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    nibbles = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    parts = -(-inputs // PART)
    return nibbles, torch.rand(outputs, parts, generator=generator) / 8, torch.randn(outputs, parts, generator=generator)


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The products as compiled for a processor without instructions made for them."""
    if build.load_cpu_kernels() is None:  # which loads the OpenMP runtime as well
        pytest.skip("no compiled kernels here")
    source: Path = build.SOURCES / "quantized_linear.cpp"
    library = tmp_path_factory.mktemp("portable") / "products.so"
    flags = [flag for flag in build.COMPILE_FLAGS if flag != "-march=native"]
    build._run([build._compiler(), *flags, "-c", str(source), "-o", f"{library}.o"])
    build._run([build._compiler(), "-shared", f"{library}.o", "-o", str(library)])
    loaded = ctypes.CDLL(str(library))
    assert not loaded.specdec_quantized_is_fast()
    return loaded


def blocks_of(kind: str, outputs: int, inputs: int) -> tuple[Tensor, BlockShape]:
    blocks = int4.pack(four_bit(outputs, inputs)) if kind == "int4" else int8.quantize(random(outputs, inputs))
    return blocks, BlockShape(outputs, inputs, kind)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_an_int8_weight_comes_back_to_within_half_a_level(outputs: int, inputs: int) -> None:
    weight, shape = random(outputs, inputs), BlockShape(outputs, inputs)
    back = dequantize(int8.quantize(weight), shape)[:outputs]
    padded = torch.zeros(outputs, shape.groups * GROUP)
    padded[:, :inputs] = weight.abs()
    level = padded.view(outputs, shape.groups, GROUP).amax(-1).repeat_interleave(GROUP, dim=1)[:, :inputs] / 127
    assert ((back - weight).abs() <= 0.51 * level + 2**-8 * weight.abs()).all()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_int4_blocks_hold_what_was_put_in_to_half_a_step(outputs: int, inputs: int) -> None:
    nibbles, scales, minima = four_bit(outputs, inputs)
    back = dequantize(int4.pack((nibbles, scales, minima)), BlockShape(outputs, inputs, "int4"))[:outputs]
    column = torch.arange(inputs) // PART
    step = torch.maximum(scales.amax(1) / 12_000, (8 * scales - minima).abs().amax(1) / 32_000).unsqueeze(1)
    error = (back - (nibbles * scales[:, column] - minima[:, column])).abs()
    assert (error <= 0.501 * step * (1 + (nibbles.float() - 8).abs()) + 1e-6).all()


@pytest.mark.parametrize("kind", int4.KINDS)
def test_blocks_of_gguf_files_are_read_without_loss(kind: str) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (6, 768 // numbers, size), dtype=np.uint8)
    raw[..., :4] = np.array([0.01, 0.02], dtype=np.float16).view(np.uint8)  # d and m or dmin; of Q4_0, d and two of the nibbles
    raw = raw.reshape(6, -1)
    nibbles, scales, minima = int4.read_gguf_blocks(raw, kind)
    column = torch.arange(768) // PART
    expected = torch.from_numpy(gguf_dequantize(raw, GGMLQuantizationType[kind]))
    torch.testing.assert_close(nibbles * scales[:, column] - minima[:, column], expected)


@BY_FORMAT
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 13, 65])
def test_the_kernel_does_what_the_reference_does(kind: str, outputs: int, inputs: int, rows: int) -> None:
    blocks, shape = blocks_of(kind, outputs, inputs)
    x = random(rows, inputs, seed=1) * 3
    bias = random(outputs, seed=2) if rows % 2 else None
    torch.testing.assert_close(quantized_linear(x, blocks, shape, bias), linear_reference(x, blocks, shape, bias), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("nibble", [0, 15])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_that_int4_can_have_are_exact(nibble: int, sign: int) -> None:
    """A part's in 16 bits, a group's in 32: scale and offset at their limits, and all products of one sign."""
    outputs, inputs = 32, 384
    scales = torch.full((outputs, inputs // PART), 12_000.0)
    minima = 8 * scales - (32_000 if nibble else -32_000)
    blocks = int4.pack((torch.full((outputs, inputs), nibble, dtype=torch.uint8), scales, minima))
    found = quantized_linear(torch.full((9, inputs), 127.0 * sign), blocks, BlockShape(outputs, inputs, "int4"), None)
    exact = sign * inputs * 127 * (12_000 * (nibble - 8) + (32_000 if nibble else -32_000))
    torch.testing.assert_close(found, torch.full((9, outputs), float(exact)), rtol=1e-6, atol=0)


@BY_FORMAT
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 576), (33, 130)])
def test_the_portable_form_does_what_the_fast_one_does(kind: str, outputs: int, inputs: int, portable: ctypes.CDLL) -> None:
    (blocks, shape), x = blocks_of(kind, outputs, inputs), random(5, inputs, seed=1)
    found = torch.empty(5, outputs)
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    sizes = (number(len(x)), number(inputs), number(outputs))
    tensors = (pointer(blocks.data_ptr()), pointer(), pointer(found.data_ptr()))
    portable.specdec_quantized_linear(number(FORMATS.index(kind)), pointer(x.data_ptr()), *sizes, *tensors, ctypes.c_int(1))
    torch.testing.assert_close(found, quantized_linear(x, blocks, shape, None), rtol=1e-5, atol=2e-5)


@BY_FORMAT
def test_the_product_is_close_to_the_exact_one(kind: str) -> None:
    (blocks, shape), x = blocks_of(kind, 64, 512), random(9, 512, seed=1)
    exact = x @ (dequantize(blocks, shape) if kind == "int4" else random(64, 512)).T
    assert (quantized_linear(x, blocks, shape, None) - exact).norm() < 0.012 * exact.norm()


@BY_FORMAT
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 576), (33, 130)])
def test_a_row_is_the_same_bits_whatever_the_other_rows_are(kind: str, outputs: int, inputs: int) -> None:
    (blocks, shape), x = blocks_of(kind, outputs, inputs), random(150, inputs, seed=1)
    together = quantized_linear(x, blocks, shape, None)
    for size in range(1, 71):
        apart = torch.cat([quantized_linear(part, blocks, shape, None) for part in x.split(size)])
        assert torch.equal(together, apart), size


@BY_FORMAT
def test_a_row_that_is_not_finite_spoils_no_other(kind: str) -> None:
    (blocks, shape), x = blocks_of(kind, 40, 200), random(9, 200, seed=1)
    expected = quantized_linear(x, blocks, shape, None)
    x[4, 3], x[6, 150] = torch.nan, torch.inf
    found = quantized_linear(x, blocks, shape, None)
    assert not found[[4, 6]].isfinite().any()
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(found[others], expected[others])


def test_zeros_give_zeros_and_a_constant_row_is_exact() -> None:
    shape = BlockShape(40, 64)
    assert not quantized_linear(torch.zeros(2, 64), int8.quantize(random(40, 64)), shape, None).any()
    assert not quantized_linear(random(2, 64), int8.quantize(torch.zeros(40, 64)), shape, None).any()
    ones = quantized_linear(torch.ones(1, 64), int8.quantize(torch.ones(40, 64)), shape, None)
    torch.testing.assert_close(ones, torch.full((1, 40), 64.0), rtol=4e-3, atol=0)  # scales have 8 bits


def test_the_pass_replaces_linears_and_a_tied_embedding() -> None:
    model = nn.Module()
    model.embed, model.inner = nn.Embedding(70, 36), nn.Sequential(nn.Linear(36, 50), nn.Linear(50, 36, bias=False))
    model.head = nn.Linear(36, 70, bias=False)
    model.head.weight = model.embed.weight
    before = model.embed(torch.tensor([0, 69, 33])).detach(), model.inner(random(4, 36)).detach()
    quantize_linears(model)
    assert isinstance(model.embed, QuantizedEmbedding)
    assert isinstance(model.head, QuantizedLinear) and isinstance(model.inner[0], QuantizedLinear)
    torch.testing.assert_close(model.embed(torch.tensor([0, 69, 33])), before[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(model.inner(random(4, 36)), before[1], atol=0.05, rtol=0.05)


def test_wrong_input_is_told() -> None:
    blocks, shape = blocks_of("int8", 64, 128)
    with pytest.raises(ValueError, match=r"x must be \[T, 128\], got \(2, 127\)"):
        quantized_linear(random(2, 127), blocks, shape, None)
    with pytest.raises(TypeError, match="blocks must be contiguous uint8"):
        quantized_linear(random(2, 128), blocks[:1], shape, None)
