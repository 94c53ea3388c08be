"""The compiled Triton kernel of redundancy on a GPU equals the reference, and is the kernel that is used there."""

from __future__ import annotations

import pytest
import torch

from sparse_rl.kernels import mean_similarity, redundancy
from sparse_rl.kernels.redundancy import check_redundancy

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.first(0)]


def entries(rows: int, heads: int, width: int, dim: int) -> list[torch.Tensor]:
    """Return bfloat16 keys near a few directions, with positions and ragged lengths; some cosines are near 0.5."""
    generator = torch.Generator().manual_seed(width + dim)
    directions = torch.randn(rows, heads, 4, dim, generator=generator)
    choice = torch.randint(4, (rows, heads, width, 1), generator=generator).expand(-1, -1, -1, dim)
    keys = directions.gather(2, choice) + torch.randn(rows, heads, width, dim, generator=generator)
    positions = torch.rand(rows, heads, width, generator=generator).argsort(-1)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[0] = width
    return [keys.bfloat16().cuda(), positions.cuda(), lengths.cuda()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_triton_kernel_passes_the_check(dtype: torch.dtype, dim: int) -> None:
    assert check_redundancy(dtype, dim).failure is None


@pytest.mark.parametrize(("rows", "heads", "width", "dim"), [(3, 2, 500, 64), (28, 4, 2176, 128), (2, 8, 9000, 128)])
def test_the_kernel_equals_the_reference_except_at_the_threshold(rows: int, heads: int, width: int, dim: int) -> None:
    """Rounding moves fewer than 1 % of the sums across the threshold of 0.5."""
    keys, positions, lengths = entries(rows, heads, width, dim)
    actual = mean_similarity(keys, positions, lengths, "triton")
    expected = mean_similarity(keys, positions, lengths, "torch")
    padding = expected.isinf()
    assert torch.equal(actual.isinf(), padding)
    assert (actual[~padding] >= 0).all()
    difference = ((actual - expected) * lengths[:, None, None])[~padding].abs()  # in units of one similarity
    assert (difference > 0.4).float().mean() < 0.01  # here a similarity is on the other side of the threshold
    small = difference[difference <= 0.4]
    assert (small <= 3e-5 * (1 + (expected * lengths[:, None, None])[~padding][difference <= 0.4])).all()


def test_results_do_not_depend_on_the_batch_or_the_slots() -> None:
    """To the last bit, if repeated, alone or permuted."""
    keys, positions, lengths = entries(9, 4, 700, 128)
    together = mean_similarity(keys, positions, lengths, "triton")
    for _ in range(3):
        assert torch.equal(mean_similarity(keys, positions, lengths, "triton"), together)
    for row, length in enumerate(lengths.tolist()):
        slots = torch.randperm(length, device="cuda")
        alone = keys[row : row + 1, :, slots], positions[row : row + 1, :, slots], lengths[row : row + 1]
        assert torch.equal(mean_similarity(*alone, "triton")[0], together[row][:, slots])


def test_the_triton_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = entries(2, 2, 100, 64)
    assert check_redundancy(torch.bfloat16, 64).failure is None
    monkeypatch.setattr(redundancy, "total_similarity", None)
    assert mean_similarity(*arguments).isfinite().any()
