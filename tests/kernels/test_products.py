"""On a CPU in float32, a matrix product of few rows rounds differently from the same rows among many. `padded_layers`
pads few rows, so that results do not depend on the number of rows.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparse_rl.kernels.exact import ROWS, padded, padded_layers

MANY = 208  # a multiple of ROWS


@pytest.mark.parametrize("inner", [8, 64, 172, 512, 896])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 17, 40])
def test_few_rows_round_like_many_rows(inner: int, rows: int) -> None:
    """Linear layers and activations, bit for bit, among 208 rows."""
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(MANY, inner, generator=generator)
    weight, bias = torch.randn(96, inner, generator=generator), torch.randn(96, generator=generator)
    wide = F.linear(x, weight, bias)
    few = padded(lambda part: F.linear(part, weight, bias), x[:rows])
    assert torch.equal(few, wide[:rows])
    with padded_layers(rows, x.device):
        assert torch.equal(F.linear(x[None, :rows], weight, bias), few[None])
        assert torch.equal(F.silu(x[:rows]), F.silu(x)[:rows])
        assert torch.equal(F.silu(x[:rows], inplace=False), F.silu(x)[:rows])
        tanh = {"approximate": "tanh"}  # Gemma's
        assert torch.equal(F.gelu(x[:rows], **tanh), F.gelu(x, **tanh)[:rows])


def test_only_float32_rows_are_padded() -> None:
    """To the next multiple of ROWS."""
    shapes = []

    def record_shape(rows: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(rows.shape))
        return rows[:, :1]

    assert padded(record_shape, torch.ones(2, 3, 5)).shape == (2, 3, 1)
    assert padded(record_shape, torch.ones(ROWS, 5)).shape == (ROWS, 1)
    assert padded(record_shape, torch.ones(3, 5, dtype=torch.float64)).shape == (3, 1)
    assert padded(record_shape, torch.ones(0, 5)).shape == (0, 1)
    assert padded(record_shape, torch.ones(5)).shape == (1,)
    assert padded(record_shape, torch.ones(ROWS + 1, 5)).shape == (ROWS + 1, 1)
    assert shapes == [(ROWS, 5), (ROWS, 5), (3, 5), (0, 5), (ROWS, 5), (2 * ROWS, 5)]
