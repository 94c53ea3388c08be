"""The fast pursuit of Attention Matching (`select: omp_fast`, the paper's algorithm 2) chooses the same entries in the
same order as a slow reference that follows the paper line by line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from matching_reference import naive_fast_pursuit, naive_pursuit

from sparse_rl.matching import Block, Fit, match, refit
from sparse_rl.methods.am.match import BETWEEN_FITS, FAST_K, FAST_TAU, features, pursue, pursued

AT_ONCE = BETWEEN_FITS["omp_fast"]
SHAPES = [(60, 16, 30), (60, 13, 30), (45, 19, 24), (30, 3, 12), (40, 8, 9)]  # entries, chosen entries, queries


def features_of(entries: int, queries: int, seed: int, clustered: bool, heads: int = 3) -> torch.Tensor:
    """Return phi = exp(logits), [heads, queries, entries], of random keys, which may lie in 5 clusters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys = normal(heads, entries, 16)
    if clustered:
        centres = torch.randint(5, (heads, entries, 1), generator=generator).expand(-1, -1, 16)
        keys = normal(heads, 5, 16).gather(1, centres) + 0.3 * keys
    return features(1.5 * normal(heads, queries, 16) @ keys.mT / 4)[0]


def chosen_slowly(phi: torch.Tensor, count: int, **settings: int) -> list[list[int]]:
    return [naive_fast_pursuit(head, count, **settings)[0] for head in phi]


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.few(8)
def test_fast_pursuit_chooses_the_entries_of_algorithm_2(
    shape: tuple[int, int, int], clustered: bool, gram: bool, tally: Callable
) -> None:
    """In order, with weights, before a pruning. More queries than entries are needed for unique weights."""
    entries, count, queries = shape
    for seed in range(4):
        phi = features_of(entries, queries, seed, clustered)
        allowed = torch.ones(len(phi), entries, dtype=torch.bool)
        ours, weights = pursue(phi, count, allowed, gram, at_once=AT_ONCE)
        after = pursued(phi, count, allowed, gram, AT_ONCE)
        for head in range(len(phi)):
            target, best = naive_fast_pursuit(phi[head], count, bound=math.inf)
            assert ours[head].tolist() == target
            torch.testing.assert_close(weights[head], best, atol=1e-8, rtol=1e-8)
            assert after[head].tolist() == sorted(naive_fast_pursuit(phi[head], count)[0])
        tally("am, keys pursued", 2 * ours.numel())


@pytest.mark.parametrize("clustered", [False, True])
def test_control_another_k_or_tau_chooses_other_entries(clustered: bool) -> None:
    """The missing mass stays between two fits, so the choice depends on k x tau alone. With 1 and 1 the reference is
    algorithm 1."""
    assert (FAST_K, FAST_TAU) == (4, 2)
    changes = {(1, 2): 0, (8, 2): 0, (4, 1): 0, (4, 3): 0}
    for seed in range(4):
        phi = features_of(60, 30, seed, clustered)
        paper = chosen_slowly(phi, 17)
        assert chosen_slowly(phi, 17, k=2, tau=4) == chosen_slowly(phi, 17, k=8, tau=1) == paper
        assert chosen_slowly(phi, 17, k=1, tau=1) == [naive_pursuit(head, 17)[0] for head in phi]
        for k, tau in changes:
            differing = zip(chosen_slowly(phi, 17, k=k, tau=tau), paper, strict=True)
            changes[k, tau] += sum(a != b for a, b in differing)
    assert min(changes.values()) >= 8, changes


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize(("count", "queries"), [(8, 10), (10, 12), (11, 12)])
@pytest.mark.few(2)
def test_pruned_entries_are_replaced_as_in_the_reference(count: int, queries: int, gram: bool, tally: Callable) -> None:
    """Entries with log w < -7 (C.2), up to 8 at once. Controls: heads differ, and some discard none."""
    generator = torch.Generator().manual_seed(2)
    phi = torch.randn(300, queries, 24, generator=generator, dtype=torch.float64).exp()
    allowed = torch.ones(300, 24, dtype=torch.bool)
    weights = pursue(phi, count, allowed, gram, at_once=AT_ONCE)[1]
    assert len((weights < math.exp(-7)).sum(-1).unique()) >= 3
    chosen = pursued(phi, count, allowed, gram, AT_ONCE)
    for row in range(300):
        assert chosen[row].tolist() == sorted(naive_fast_pursuit(phi[row], count)[0])
    tally("am, keys pursued", chosen.numel())


def test_a_pursuit_without_given_entries_starts_anew() -> None:
    phi = features_of(30, 12, 0, False)
    allowed = torch.ones(3, 30, dtype=torch.bool)
    first = pursue(phi, 5, allowed, False, at_once=AT_ONCE)[0]
    others = allowed.scatter(1, first, False)
    restarted = pursue(phi, 5, others, False, first[:, :0], AT_ONCE)
    plain = pursue(phi, 5, others, False, at_once=AT_ONCE)
    assert all(torch.equal(a, b) for a, b in zip(restarted, plain, strict=True))


def block_of(seed: int, equal: bool = False) -> Block:
    """Return 2 rows of 2 heads with 40 entries, 5 of the last row not competing; `equal` makes a head's keys equal."""
    generator = torch.Generator().manual_seed(seed)
    keys, values, queries = (torch.randn(2, 2, n, 16, generator=generator) for n in (40, 40, 48))
    competing = torch.ones(2, 1, 40, dtype=torch.bool)
    competing[-1, :, 35:] = False
    keys = keys[:, :, :1].expand_as(keys) if equal else keys
    return Block(keys, values, queries, torch.zeros(2, 2, 40), competing, 0.25)


def test_match_fits_the_entries_of_the_fast_pursuit() -> None:
    """Ascending, among competing entries alone. Control: algorithm 1 chooses others."""
    block = block_of(1)
    index, bias, values = match(block, 20, Fit("omp_fast"))
    phi = features(block.logits())[0]
    for row in range(2):
        for head in range(2):
            count = int(block.competing[row].sum())
            assert index[row, head].tolist() == sorted(naive_fast_pursuit(phi[row, head, :, :count], 20)[0])
    assert all(torch.equal(a, b) for a, b in zip((bias, values), refit(block, index, Fit("omp")), strict=True))
    assert not torch.equal(index, match(block, 20, Fit("omp"))[0])


def test_equal_keys_give_finite_fits() -> None:
    """With 40 equal keys the products are singular. Results are finite, and the bias of each of 20 keys is log 2."""
    index, bias, values = match(block_of(1, equal=True), 20, Fit("omp_fast"))
    assert bool(values.isfinite().all())
    assert all(a < b for row in index.flatten(0, 1).tolist() for a, b in pairwise(row))
    torch.testing.assert_close(bias[0], torch.full((2, 20), math.log(2.0)), atol=1e-4, rtol=0)
