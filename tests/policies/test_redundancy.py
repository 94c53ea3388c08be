"""Redundancy is computed in tiles of rows, without N x N memory, and equals the plain computation to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sparse_rl.kernels import redundancy
from sparse_rl.kernels.redundancy import LEAST_ROWS, SIMILARITIES, UNDER, similarity_tiles, total_similarity


def plain(keys: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Compute the redundancy [Hkv, N] of keys [Hkv, N, D] in the order [Hkv, N] from all N x N similarities at once."""
    unit = keys / keys.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-8)
    similarity = unit @ unit.transpose(-1, -2)
    similarity.diagonal(dim1=-2, dim2=-1).zero_()
    similarity = torch.where(similarity > UNDER, similarity, 0.0)
    age = torch.empty_like(order).scatter_(-1, order, torch.arange(1, order.shape[1] + 1).expand(order.shape))
    most_recent = (similarity.sign() * age[:, None]).argmax(-1, keepdim=True)
    return similarity.scatter(-1, most_recent, 0.0).double().sum(dim=-2).float()


def similar_keys(heads: int, count: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys around a few directions, some equal and some 0, and slots in an arbitrary order of position."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(heads, 3, dim, generator=generator)
    which = torch.randint(0, 3, (heads, count), generator=generator)
    spread = torch.rand(heads, count, 1, generator=generator).round(decimals=1)
    noise = spread * torch.randn(heads, count, dim, generator=generator)
    keys = few.gather(1, which[..., None].expand(-1, -1, dim)) + noise
    keys[:, ::17] = 0.0
    return keys, torch.rand(heads, count, generator=generator).argsort(-1)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore torch's number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("tile", [1, 2**14])
@pytest.mark.parametrize("thread_count", [1, 2, 4])
def test_redundancy_in_tiles_equals_the_plain_computation_bit_for_bit(
    tile: int, thread_count: int, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any tile size and number of threads. Control: entries in reverse order of position."""
    monkeypatch.setattr(redundancy, "SIMILARITIES", tile)
    torch.set_num_threads(thread_count)
    tile_counts = set()
    for seed, (count, dim) in enumerate([(1, 8), (2, 32), (17, 8), (63, 64), (100, 80), (257, 128), (411, 32)]):
        keys, order = similar_keys(1 + seed % 3, count, dim, seed)
        tiled = total_similarity(keys, order)
        assert torch.equal(tiled, plain(keys, order)), (count, dim)
        tile_counts.add(len(similarity_tiles(count)))
        if count > 60:
            assert tiled.max() > 1, "no keys are similar"
            assert not torch.equal(tiled, plain(keys, order.flip(-1))), "control: reverse order of position"
    assert max(tile_counts) >= (12 if tile == 1 else 8)


def test_control_a_float32_sum_depends_on_its_order() -> None:
    """A float64 sum, rounded to float32, does not. So the code sums in float64."""
    values = torch.rand(411, 300, generator=torch.Generator().manual_seed(0)) / 2 + 0.5
    assert not torch.equal(values.sum(0), values.flip(0).cumsum(0)[-1])
    assert torch.equal(values.double().sum(0).float(), values.flip(0).double().cumsum(0)[-1].float())


@pytest.mark.parametrize("count", [1, 2, 1000, 1024, 1025, 8192, 32768, 100_000])
def test_tiles_cover_all_rows_and_are_bounded(count: int) -> None:
    """Of nearly equal sizes, at most twice SIMILARITIES numbers, unless LEAST_ROWS rows already need more."""
    tiles = similarity_tiles(count)
    assert [row for first, last in tiles for row in range(first, last)] == list(range(count))
    rows = {last - first for first, last in tiles}
    assert max(rows) - min(rows) <= 1
    assert min(rows) >= min(LEAST_ROWS, count)
    assert max(rows) * count <= max(2 * SIMILARITIES, (LEAST_ROWS + 1) * count)
    assert (len(tiles) == 1) == (count < 1100)
