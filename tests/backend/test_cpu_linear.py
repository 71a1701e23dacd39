import pytest
import torch
from torch import nn

from specdec.backend.cpu_linear import ROW_TILES, PackedLinear, exact_row_tile, pack_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_packed_layer_computes_what_the_plain_one_does(bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 40, bias=bias).to(dtype)
    x = torch.randn(20, 96).to(dtype)
    model = nn.Sequential(plain)
    pack_linears(model)
    assert isinstance(model[0], PackedLinear)
    with torch.inference_mode():
        assert (model(x) - plain(x)).abs().max() < tolerance


def test_at_the_exact_tile_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 40), nn.Linear(40, 1000))
    pack_linears(model)
    tile = exact_row_tile(model)
    assert tile in ROW_TILES
    x = torch.randn(36 * tile, 96)
    with torch.inference_mode():
        alone = torch.cat([model(part) for part in x.split(tile)])
        for tiles in (2, 3, 9, 36):
            assert torch.equal(torch.cat([model(part) for part in x.split(tile * tiles)]), alone)


def test_the_tile_of_a_layer_that_mixes_rows_is_the_widest_tried() -> None:
    class Mixing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * len(x)

    assert exact_row_tile(Mixing(8, 8)) == ROW_TILES[-1]


def test_packing_twice_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    pack_linears(model)
    first = model[0]
    pack_linears(model)
    assert model[0] is first
