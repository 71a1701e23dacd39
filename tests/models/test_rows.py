"""Everything but the matrix products gives a row the same bits whatever the other rows are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.models.activations import ACTIVATIONS
from specdec.models.config import Rope
from specdec.models.layers import RMSNorm
from specdec.models.rotary import RotaryTables, rotate

REFERENCES = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def _check(function, x):
    whole = function(x)
    for rows in (1, 2, 3, 5, 7, 16, 17, 33, len(x) - 1):
        assert torch.equal(function(x[:rows].clone()), whole[:rows])
        assert torch.equal(function(x[-rows:].clone()), whole[-rows:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [17, 100, 576, 1000, 1536, 8960, 40000])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_rows_are_independent_and_right(name, width, dtype):
    x = (torch.randn(40, width, generator=torch.Generator().manual_seed(0)) * 6).to(dtype)
    _check(ACTIVATIONS[name], x)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-2, 1e-3)
    torch.testing.assert_close(ACTIVATIONS[name](x), REFERENCES[name](x), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_of_extreme_numbers_is_finite(name):
    x = torch.tensor([[-1e30, -200.0, -90.0, -30.0, 0.0, 30.0, 90.0, 200.0, 1e12]])
    torch.testing.assert_close(ACTIVATIONS[name](x), REFERENCES[name](x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 576), (40, 100), (40, 3, 64), (40, 1, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rows_are_independent(shape, dtype):
    norm = RMSNorm(shape[-1], 1e-6).to(dtype)
    with torch.inference_mode():
        _check(norm, torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))


def test_rotation_depends_on_the_position_alone():
    tables = RotaryTables([Rope((1.0, 0.1, 0.01)), Rope((0.5, 0.05, 0.005), scaling=1.5)], max_positions=50)
    x = torch.randn(40, 2, 6, generator=torch.Generator().manual_seed(0))
    for index in (0, 1):
        whole = rotate(x, tables.rotations(torch.arange(40))[index])
        for row in (0, 7, 39):
            assert torch.equal(rotate(x[row : row + 1], tables.rotations(torch.tensor([row]))[index]), whole[row : row + 1])
    assert whole.norm() == pytest.approx(1.5 * x.norm().item(), rel=1e-5)
    assert tables.rotations(torch.tensor([3]))[0][0].dtype == torch.float32
