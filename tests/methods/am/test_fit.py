"""Attention Matching selects entries, and fits biases ("weights" are their exponentials) and values: equal to plain
references, with right gradients, and finite in degenerate cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from matching_reference import naive_pursuit, naive_values, naive_weights
from solving import least_squares

from sparse_rl.errors import NotFiniteError
from sparse_rl.matching import Block, Fit, match, refit
from sparse_rl.methods.am.match import (
    descended,
    features,
    fit_values,
    fit_weights,
    flat_weights,
    paper_values,
    paper_weights,
    pursue,
    pursued,
    pursuit_weights,
)

FITS = {"attention": Fit(), "omp": Fit(select="omp")}


def block_of(
    rows: int = 2, heads: int = 2, entries: int = 40, dim: int = 16, queries: int = 48, dtype=torch.float32
) -> Block:
    """Return random entries and reference queries; 5 entries of the last row do not compete (padding)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    competing = torch.ones(rows, 1, entries, dtype=torch.bool)
    competing[-1, :, entries - 5 :] = False
    return Block(
        keys=normal(rows, heads, entries, dim),
        values=normal(rows, heads, entries, dim),
        queries=normal(rows, heads, queries, dim) * 1.5,
        bias=0.3 * normal(rows, heads, entries).float(),
        competing=competing,
        scaling=dim**-0.5,
    )


def kept_features(block: Block, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exp(logit) of the kept entries for each query, and the mass: the sum of exp(logit) over all entries."""
    phi, mass = features(block.logits())
    return phi.gather(3, index[:, :, None].expand(-1, -1, phi.shape[2], -1)), mass


@pytest.mark.parametrize("bound", [3.0, 0.5])
def test_fitted_weights_are_nearly_the_best_within_their_bounds(bound: float, tally: Callable) -> None:
    """30 steps of descent are within 2 % of 3,000. Control: weights of 1 are over 50 % above."""
    block = block_of()
    index = match(block, 20, Fit())[0]
    kept, mass = (tensor.flatten(0, 1) for tensor in kept_features(block, index))
    for phi, target in zip(kept, mass, strict=True):
        best, ours = naive_weights(phi, target, bound), fit_weights(phi, target, bound)
        long = descended(phi, target, ours, bound, 3000)
        least, ours_residual, plain = (
            float((phi @ w - target).square().sum()) for w in (best, ours, torch.ones_like(best))
        )
        assert bool((ours.log().abs() <= bound + 1e-12).all())
        torch.testing.assert_close(long, best, atol=1e-6, rtol=0)
        assert least <= ours_residual <= 1.02 * least
        assert plain > 1.5 * least
        tally("am, fitted numbers", best.numel())


@pytest.mark.parametrize("queries", [8, 30])
@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_fitted_values_equal_a_ridge_regression(queries: int, ridge: float, tally: Callable) -> None:
    """Towards the old values, with fewer reference queries than the 12 entries and with more."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, queries, 12, generator=generator, dtype=torch.float64).softmax(-1)
    y, values = (torch.randn(3, n, 5, generator=generator, dtype=torch.float64) for n in (queries, 12))
    result = fit_values(x, y, values, ridge)
    for row in range(3):
        torch.testing.assert_close(result[row], naive_values(x[row], y[row], values[row], ridge), atol=1e-9, rtol=0)
    tally("am, fitted numbers", result.numel())
    assert (result - values).abs().max() > 0.1  # control


@pytest.mark.parametrize("gram", [False, True])
def test_pursuit_chooses_the_entries_and_weights_of_the_papers_algorithm(gram: bool, tally: Callable) -> None:
    """With or without the Gram matrix."""
    block = block_of()
    phi = features(block.logits())[0].flatten(0, 1)
    allowed = block.competing.expand(2, 2, -1).flatten(0, 1)
    chosen, weights = pursue(phi, 15, allowed, gram)
    for row in range(4):
        count = int(allowed[row].sum())
        target, naive = naive_pursuit(phi[row, :, :count], 15)
        assert chosen[row].tolist() == target
        torch.testing.assert_close(weights[row], naive, atol=1e-9, rtol=0)
        tally("am, keys pursued", len(target))


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize(("count", "queries"), [(8, 10), (10, 12), (11, 12)])
@pytest.mark.few(2)
def test_pruned_entries_are_replaced_by_other_entries(count: int, queries: int, gram: bool, tally: Callable) -> None:
    """Until all log w are at least -7 (C.2), also if some rows have fewer other entries than they would need."""
    generator = torch.Generator().manual_seed(2)
    phi = torch.randn(300, queries, 12, generator=generator, dtype=torch.float64).exp()
    allowed = torch.ones(300, 12, dtype=torch.bool)
    first, weights = pursue(phi, count, allowed, gram)
    is_poor = weights < math.exp(-7)
    # controls: some rows have such an entry and some do not; with 11 of 12, some rows have more than they can replace
    assert 5 < int(is_poor.any(-1).sum()) < 295
    assert count < 11 or bool((is_poor.sum(-1) > 1).any())
    chosen = pursued(phi, count, allowed, gram)
    rounds = set()
    for row in range(300):
        target, _ = naive_pursuit(phi[row], count)
        assert chosen[row].tolist() == sorted(target)
        if int(is_poor[row].sum()) <= 12 - count:
            rounds.add(bool(set(first[row].tolist()) != set(target)))
    tally("am, keys pursued", chosen.numel())
    assert rounds == {False, True}, "control: entries are replaced in some rows, but not in all"


def test_pruning_continues_until_all_weights_pass() -> None:
    """Some of these rows need more than three rounds."""
    generator = torch.Generator().manual_seed(5)
    phi = torch.randn(64, 14, 60, generator=generator, dtype=torch.float64).exp()
    chosen = pursued(phi, 12, torch.ones(64, 60, dtype=torch.bool), False)
    kept = phi.gather(2, chosen[:, None].expand(-1, 14, -1))
    weights = torch.linalg.lstsq(kept, phi.sum(-1, keepdim=True)).solution[..., 0]
    assert float(weights.min()) >= math.exp(-7)


@pytest.mark.parametrize("name", FITS)
def test_rows_and_heads_are_fitted_independently(name: str) -> None:
    """Entries that do not compete are never kept, and their keys and values have no influence."""
    block = block_of()
    index, bias, values = match(block, 20, FITS[name])
    assert bool((index.diff(dim=-1) > 0).all())
    assert int(index[1].max()) < 35
    noisy = replace(
        block,
        keys=torch.where(block.competing[..., None], block.keys, 7.0),
        values=torch.where(block.competing[..., None], block.values, -7.0),
    )
    with_noise = match(noisy, 20, FITS[name])
    assert all(torch.equal(a, b) for a, b in zip((index, bias, values), with_noise, strict=True))
    for row in range(2):
        count = int(block.competing[row].sum())
        for head in range(2):
            at = (slice(row, row + 1), slice(head, head + 1))
            keys, held, old = (tensor[at][:, :, :count] for tensor in (block.keys, block.values, block.bias))
            all_compete = torch.ones(1, 1, count, dtype=torch.bool)
            alone = Block(keys, held, block.queries[at], old, all_compete, block.scaling)
            own_index, own_bias, own_values = match(alone, 20, FITS[name])
            assert torch.equal(own_index[0, 0], index[row, head])
            torch.testing.assert_close(own_bias[0, 0], bias[row, head], atol=1e-6, rtol=0)
            torch.testing.assert_close(own_values[0, 0], values[row, head], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FITS)
def test_fitted_entries_approximate_the_output_of_all_entries(name: str) -> None:
    """Errors are at most half of those without fits. Controls: with biases or values alone they are larger."""
    block = block_of()
    index, bias, values = match(block, 20, FITS[name])
    logits = block.logits()
    y, mass = logits.softmax(-1) @ block.values.double(), logits.logsumexp(-1)
    deep = index[..., None].expand(-1, -1, -1, 16)
    raw = block.queries.double() @ block.keys.double().gather(2, deep).mT * block.scaling

    def error(beta: torch.Tensor, held: torch.Tensor) -> tuple[float, float]:
        biased_logits = raw + beta.double()[:, :, None]
        return float((biased_logits.softmax(-1) @ held.double() - y).norm() / y.norm()), float(
            (biased_logits.logsumexp(-1) - mass).abs().mean()
        )

    old_bias, old_values = block.bias.gather(2, index), block.values.gather(2, deep)
    (out, off), (plain_out, plain_off) = error(bias, values), error(old_bias, old_values)
    assert out < 0.5 * plain_out
    assert off < 0.5 * plain_off
    assert error(bias, old_values)[0] > 1.5 * out  # controls: biases and values each contribute
    assert error(old_bias, values)[1] > 2 * off


def test_a_second_compaction_continues_from_the_first() -> None:
    """Biases of log 2 on all entries, as if each key occurred twice, add log 2 to the new biases."""
    all_compete = torch.ones(1, 1, 40, dtype=torch.bool)
    block = replace(block_of(rows=1, dtype=torch.float64), bias=torch.zeros(1, 2, 40), competing=all_compete)
    doubled = replace(block, bias=torch.full((1, 2, 40), math.log(2.0)))
    keys, values = (torch.cat([tensor, tensor], dim=2) for tensor in (block.keys, block.values))
    all_80 = torch.ones(1, 1, 80, dtype=torch.bool)
    twice = Block(keys, values, block.queries, torch.zeros(1, 2, 80), all_80, block.scaling)
    torch.testing.assert_close(doubled.logits().logsumexp(-1), twice.logits().logsumexp(-1), atol=1e-6, rtol=0)
    index, bias, _ = match(doubled, 20, Fit())
    plain, first, _ = match(block, 20, Fit())
    assert torch.equal(index, plain)
    torch.testing.assert_close(bias, first + math.log(2.0), atol=1e-5, rtol=0)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("queries", [8, 48])
def test_gradients_equal_finite_differences(name: str, queries: int) -> None:
    """Along a random direction of keys, values and queries."""
    block = block_of(rows=1, heads=1, entries=16, dim=6, queries=queries, dtype=torch.float64)
    index = match(block, 10, FITS[name])[0]
    tensors = [tensor.clone().requires_grad_() for tensor in (block.keys, block.values, block.queries)]
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for tensor in tensors]
    weight = torch.randn(1, 1, 10, 6, generator=generator, dtype=torch.float64)

    def loss(*at: torch.Tensor) -> torch.Tensor:
        here = replace(block, keys=at[0], values=at[1], queries=at[2])
        bias, values = refit(here, index, FITS[name])
        return (values * weight).sum() + bias.sum()

    loss(*tensors).backward()
    grads = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]
    slope, step = sum(float((grad * d).sum()) for grad, d in zip(grads, directions, strict=True)), 1e-4

    def moved(by: float) -> float:
        return float(loss(*(tensor.detach() + by * d for tensor, d in zip(tensors, directions, strict=True))))

    assert slope == pytest.approx((moved(step) - moved(-step)) / (2 * step), rel=1e-3)


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("queries", [10, 21, 48])
def test_fits_hardly_amplify_rounding_of_their_inputs(name: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of 1e-6 move biases by at most 1e-3 and values by 1e-2. Controls: the paper's solvers; no ridge."""
    block = block_of()
    block = replace(block, queries=block.queries[:, :, :queries])
    index = match(block, 20, FITS[name])[0]
    generator = torch.Generator().manual_seed(4)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-6 * torch.randn(x.shape, generator=generator))

    noisy_block = replace(block, keys=noisy(block.keys), values=noisy(block.values), queries=noisy(block.queries))

    def change_of(fit: Fit) -> tuple[float, float]:
        (bias, values), (moved_bias, moved_values) = refit(block, index, fit), refit(noisy_block, index, fit)
        return float((moved_bias - bias).abs().max()), float((moved_values - values).abs().max())

    change_of_biases, change_of_values = change_of(FITS[name])
    assert change_of_biases < 1e-3
    assert change_of_values < 1e-2
    if name == "attention" and queries == 21:
        assert change_of(Fit(paper=True))[1] > 20 * change_of_values
    if name == "omp" and queries == 10:
        monkeypatch.setattr("sparse_rl.methods.am.match.pursuit_weights", least_squares)
        assert change_of(FITS[name])[0] > 1e-2


def test_the_weights_of_pursuit_equal_a_ridge_regression(tally: Callable) -> None:
    """Towards the best single weight, clamped, which they beat. Control: the paper's weights, without the ridge."""
    block = block_of(queries=16)
    index = match(block, 20, FITS["omp"])[0]
    kept, mass = (tensor.flatten(0, 1) for tensor in kept_features(block, index))
    for phi, target in zip(kept, mass, strict=True):
        flat = flat_weights(phi, target)
        best = naive_values(phi, target[:, None], flat[:, None], 0.1)[:, 0].clamp(math.exp(-7), math.exp(7))
        ours = pursuit_weights(phi, target, 7.0)
        torch.testing.assert_close(ours, best, atol=1e-9, rtol=0)
        tally("am, fitted numbers", len(best))
        assert float((phi @ ours - target).norm()) < 0.7 * float((phi @ flat - target).norm())
        assert float((paper_weights(phi, target, 7.0, 0) - ours).abs().max()) > 0.1


# ---- degenerate cases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("queries", [1, 5, 48])
def test_equal_keys_and_few_queries_give_finite_fits(name: str, queries: int) -> None:
    """Singular systems. With 40 equal keys and 20 kept entries, each bias is log 2."""
    block = block_of(queries=queries)
    equal_keys = replace(block, keys=block.keys[:, :, :1].expand_as(block.keys), bias=torch.zeros_like(block.bias))
    for case in (block, equal_keys):
        index, bias, values = match(case, 20, FITS[name])
        assert bool(bias.isfinite().all())
        assert bool(values.isfinite().all())
        assert index.shape == (2, 2, 20)
        assert (bias - case.bias.gather(2, index)).abs().max() <= 7 + 1e-5
    index, bias, _ = match(equal_keys, 20, Fit())
    assert torch.equal(index[0, 0], torch.arange(20))  # of equal scores, the earlier ones are kept
    two = torch.full((2, 20), math.log(2.0))  # each kept key stands for two
    torch.testing.assert_close(bias[0], two, atol=1e-5, rtol=0)


@pytest.mark.parametrize("which", ["keys", "values", "queries"])
def test_a_nan_in_the_inputs_is_an_error(which: str) -> None:
    block = block_of()
    broken = getattr(block, which).clone()
    broken[0, 1, 3, 2] = float("nan")
    with pytest.raises(NotFiniteError):
        match(replace(block, **{which: broken}), 20, Fit())


@pytest.mark.parametrize("name", FITS)
def test_the_papers_solvers_follow_appendix_c2(name: str) -> None:
    """Chosen by attention: within exp(+-3), then two projected steps; by pursuit: within exp(+-7), without a step."""
    block = block_of(rows=1, queries=30)
    index = match(block, 12 if name == "attention" else 28, Fit())[0]
    kept, mass = kept_features(block, index)
    free = torch.linalg.lstsq(kept, mass[..., None]).solution[..., 0]
    assert name == "attention" or float(free.min()) < 0, "control: no weight is clamped"
    bias = refit(block, index, replace(FITS[name], paper=True))[0] - block.bias.gather(2, index)
    if name == "omp":
        torch.testing.assert_close(bias.exp(), free.clamp(math.exp(-7), math.exp(7)).float(), atol=1e-3, rtol=1e-3)
    else:
        assert float(bias.abs().max()) <= 3 + 1e-5
        assert (bias.exp() - free.clamp(math.exp(-3), math.exp(3))).abs().max() < 1.0
    x = kept[0, 0] / kept[0, 0].sum(-1, keepdim=True)
    y = torch.randn(len(x), 4, dtype=torch.float64)
    torch.testing.assert_close(paper_values(x, y), torch.linalg.lstsq(x, y).solution, atol=1e-8, rtol=0)


def test_the_papers_biases_of_pursued_keys_may_exceed_3() -> None:
    """A key that stands for 40 equal keys gets log 40 = 3.69. Control: keys chosen by attention stay below 3."""
    block = block_of(rows=1, entries=44, queries=30)
    keys = block.keys.clone()
    keys[:, :, 4:] = keys[:, :, 4:5]
    equal_keys = replace(block, keys=keys, bias=torch.zeros(1, 2, 44), competing=torch.ones(1, 1, 44, dtype=torch.bool))
    index = torch.arange(5).expand(1, 2, 5)
    bias, _ = refit(equal_keys, index, Fit("omp", paper=True))
    torch.testing.assert_close(bias[..., 4], torch.full((1, 2), math.log(40)), atol=1e-4, rtol=0)
    boxed, _ = refit(equal_keys, index, Fit(paper=True))
    assert float(boxed.max()) == pytest.approx(3.0)
