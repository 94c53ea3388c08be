"""Fits and selection of Attention Matching against the plain references, and in degenerate cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from solving import least_squares

from sparse_rl.errors import NotFiniteError
from sparse_rl.matching import Block, Fit, match, refit
from sparse_rl.matching.fit import (
    descended,
    features,
    fit_values,
    fit_weights,
    flat_weights,
    paper_values,
    paper_weights,
    pursuit_weights,
)
from sparse_rl.matching.reference import naive_pursuit, naive_values, naive_weights
from sparse_rl.matching.select import pursue, pursued

FITS = {"attention": Fit(), "omp": Fit(select="omp")}


def block_of(
    rows: int = 2, heads: int = 2, entries: int = 40, dim: int = 16, asked: int = 48, seed: int = 0, dtype=torch.float32
) -> Block:
    """Random entries; some entries of the last row do not compete."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    competing = torch.ones(rows, 1, entries, dtype=torch.bool)
    competing[-1, :, entries - 5 :] = False
    return Block(
        keys=normal(rows, heads, entries, dim),
        values=normal(rows, heads, entries, dim),
        queries=normal(rows, heads, asked, dim) * 1.5,
        bias=0.3 * normal(rows, heads, entries).float(),
        competing=competing,
        scaling=dim**-0.5,
    )


def kept_features(block: Block, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    phi, mass = features(block.logits())
    return phi.gather(3, index[:, :, None].expand(-1, -1, phi.shape[2], -1)), mass


@pytest.mark.parametrize("bound", [3.0, 0.5])
def test_weights_come_near_the_best_within_their_bounds(bound: float, tally: Callable) -> None:
    """The residual after 30 steps is within 2 % of that after 3,000 steps, the best one. Control: no weights."""
    block = block_of()
    index = match(block, 20, Fit())[0]
    kept, mass = (one.flatten(0, 1) for one in kept_features(block, index))
    for phi, wanted in zip(kept, mass, strict=True):
        best, ours = naive_weights(phi, wanted, bound), fit_weights(phi, wanted, bound)
        long = descended(phi, wanted, ours, bound, 3000)
        least, own_part, plain = (float((phi @ w - wanted).square().sum()) for w in (best, ours, torch.ones_like(best)))
        assert bool((ours.log().abs() <= bound + 1e-12).all())
        torch.testing.assert_close(long, best, atol=1e-6, rtol=0)
        assert least <= own_part <= 1.02 * least and plain > 1.5 * least
        tally("am, fitted numbers", best.numel())


@pytest.mark.parametrize("asked", [8, 30])
@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_values_are_the_stacked_least_squares(asked: int, ridge: float, tally: Callable) -> None:
    """With fewer reference queries than entries, and with more."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, asked, 12, generator=generator, dtype=torch.float64).softmax(-1)
    y, values = (torch.randn(3, n, 5, generator=generator, dtype=torch.float64) for n in (asked, 12))
    result = fit_values(x, y, values, ridge)
    for one in range(3):
        torch.testing.assert_close(result[one], naive_values(x[one], y[one], values[one], ridge), atol=1e-9, rtol=0)
    tally("am, fitted numbers", result.numel())
    assert (result - values).abs().max() > 0.1  # control


@pytest.mark.parametrize("gram", [False, True])
def test_pursuit_chooses_and_weighs_as_the_papers_does(gram: bool, tally: Callable) -> None:
    block = block_of()
    phi = features(block.logits())[0].flatten(0, 1)
    allowed = block.competing.expand(2, 2, -1).flatten(0, 1)
    chosen, weights = pursue(phi, 15, allowed, gram)
    for row in range(4):
        count = int(allowed[row].sum())
        wanted, naive = naive_pursuit(phi[row, :, :count], 15)
        assert chosen[row].tolist() == wanted
        torch.testing.assert_close(weights[row], naive, atol=1e-9, rtol=0)
        tally("am, keys pursued", len(wanted))


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize(("count", "asked"), [(8, 10), (10, 12), (11, 12)])
def test_pruned_entries_are_replaced_by_other_entries(count: int, asked: int, gram: bool, tally: Callable) -> None:
    """Entries with log w < -7 are discarded, and the pursuit goes on from the others until all pass, as the plain
    reference does it (C.2). With 11 of 12 entries chosen, some rows cannot spare all of theirs.
    """
    generator = torch.Generator().manual_seed(2)
    phi = torch.randn(300, asked, 12, generator=generator, dtype=torch.float64).exp()
    allowed = torch.ones(300, 12, dtype=torch.bool)
    first, weights = pursue(phi, count, allowed, gram)
    is_poor = weights < math.exp(-7)
    assert 5 < int(is_poor.any(-1).sum()) < 295, "control: some rows have such an entry, some have not"
    assert count < 11 or bool((is_poor.sum(-1) > 1).any()), "control: some rows have more of them than they can spare"
    chosen = pursued(phi, count, allowed, gram)
    rounds = set()
    for row in range(300):
        wanted, _ = naive_pursuit(phi[row], count)
        assert chosen[row].tolist() == sorted(wanted)
        if int(is_poor[row].sum()) <= 12 - count:
            rounds.add(bool(set(first[row].tolist()) != set(wanted)))
    tally("am, keys pursued", chosen.numel())
    assert rounds == {False, True}, "control: in some rows the first choice stands, in some it does not"


def test_pruning_continues_until_all_weights_pass() -> None:
    """Pruning takes more than three rounds; an earlier version stopped after three."""
    generator = torch.Generator().manual_seed(5)
    phi = torch.randn(64, 14, 60, generator=generator, dtype=torch.float64).exp()
    chosen = pursued(phi, 12, torch.ones(64, 60, dtype=torch.bool), False)
    kept = phi.gather(2, chosen[:, None].expand(-1, 14, -1))
    weights = torch.linalg.lstsq(kept, phi.sum(-1, keepdim=True)).solution[..., 0]
    assert float(weights.min()) >= math.exp(-7)


@pytest.mark.parametrize("name", FITS)
def test_rows_and_heads_are_fitted_independently(name: str) -> None:
    """Batched rows equal rows alone; entries that do not compete change nothing and are never kept."""
    block = block_of()
    index, bias, values = match(block, 20, FITS[name])
    assert bool((index.diff(dim=-1) > 0).all()) and int(index[1].max()) < 35
    noisy = replace(
        block,
        keys=torch.where(block.competing[..., None], block.keys, 7.0),
        values=torch.where(block.competing[..., None], block.values, -7.0),
    )
    again = match(noisy, 20, FITS[name])
    assert all(torch.equal(a, b) for a, b in zip((index, bias, values), again, strict=True))
    for row in range(2):
        count = int(block.competing[row].sum())
        for head in range(2):
            at = (slice(row, row + 1), slice(head, head + 1))
            keys, held, old = (one[at][:, :, :count] for one in (block.keys, block.values, block.bias))
            everyone = torch.ones(1, 1, count, dtype=torch.bool)
            alone = Block(keys, held, block.queries[at], old, everyone, block.scaling)
            one, own_bias, own_values = match(alone, 20, FITS[name])
            assert torch.equal(one[0, 0], index[row, head])
            torch.testing.assert_close(own_bias[0, 0], bias[row, head], atol=1e-6, rtol=0)
            torch.testing.assert_close(own_values[0, 0], values[row, head], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FITS)
def test_fitted_entries_approximate_the_output_of_all_entries(name: str) -> None:
    """Output and mass are close under the fitted biases and values, and further off without either."""
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
    assert out < 0.5 * plain_out and off < 0.5 * plain_off
    assert error(bias, old_values)[0] > 1.5 * out  # controls: biases and values each contribute
    assert error(old_bias, values)[1] > 2 * off


def test_a_second_compaction_continues_from_the_first() -> None:
    """A bias of log 2 equals a repeated key; the new bias is added to it. Control: the old bias is lost."""
    everyone = torch.ones(1, 1, 40, dtype=torch.bool)
    block = replace(block_of(rows=1, dtype=torch.float64), bias=torch.zeros(1, 2, 40), competing=everyone)
    doubled = replace(block, bias=torch.full((1, 2, 40), math.log(2.0)))
    twice = Block(
        *(torch.cat([one, one], dim=2) for one in (block.keys, block.values)),
        block.queries, torch.zeros(1, 2, 80), torch.ones(1, 1, 80, dtype=torch.bool), block.scaling,
    )  # fmt: skip
    torch.testing.assert_close(doubled.logits().logsumexp(-1), twice.logits().logsumexp(-1), atol=1e-6, rtol=0)
    index, bias, _ = match(doubled, 20, Fit())
    plain, first, _ = match(block, 20, Fit())
    assert torch.equal(index, plain)
    torch.testing.assert_close(bias, first + math.log(2.0), atol=1e-5, rtol=0)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("asked", [8, 48])
def test_gradients_equal_finite_differences(name: str, asked: int) -> None:
    block = block_of(rows=1, heads=1, entries=16, dim=6, asked=asked, dtype=torch.float64)
    index = match(block, 10, FITS[name])[0]
    tensors = [one.clone().requires_grad_() for one in (block.keys, block.values, block.queries)]
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in tensors]
    weigh = torch.randn(1, 1, 10, 6, generator=generator, dtype=torch.float64)

    def loss(*at: torch.Tensor) -> torch.Tensor:
        here = replace(block, keys=at[0], values=at[1], queries=at[2])
        bias, values = refit(here, index, FITS[name])
        return (values * weigh).sum() + bias.sum()

    loss(*tensors).backward()
    along = sum(float((one.grad * d).sum()) for one, d in zip(tensors, directions, strict=True) if one.grad is not None)
    step = 1e-4

    def moved(by: float) -> float:
        return float(loss(*(one.detach() + by * d for one, d in zip(tensors, directions, strict=True))))

    assert along == pytest.approx((moved(step) - moved(-step)) / (2 * step), rel=1e-3)


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("asked", [10, 21, 48])
def test_rounding_of_the_queries_stays_small(name: str, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of 1e-6 in queries, keys, values move biases by at most 1e-3: with fewer queries than the 20 entries that
    are fitted, with a few more, and with many. Controls: the paper's solvers, and least squares without a ridge.
    """
    block = block_of()
    block = replace(block, queries=block.queries[:, :, :asked])
    index = match(block, 20, FITS[name])[0]
    generator = torch.Generator().manual_seed(4)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-6 * torch.randn(x.shape, generator=generator))

    other = replace(block, keys=noisy(block.keys), values=noisy(block.values), queries=noisy(block.queries))

    def moved_by(fit: Fit) -> tuple[float, float]:
        (bias, values), (moved_bias, moved_values) = refit(block, index, fit), refit(other, index, fit)
        return float((moved_bias - bias).abs().max()), float((moved_values - values).abs().max())

    of_biases, of_values = moved_by(FITS[name])
    assert of_biases < 1e-3
    assert of_values < 1e-2
    if name == "attention" and asked == 21:
        assert moved_by(Fit(paper=True))[1] > 20 * of_values
    if name == "omp" and asked == 10:
        monkeypatch.setattr("sparse_rl.matching.block.pursuit_weights", least_squares)
        assert moved_by(FITS[name])[0] > 1e-2


def test_the_weights_of_pursuit_are_a_ridge_regression(tally: Callable) -> None:
    """Equal to the reference's stacked least squares, clamped; nearer the mass than a single weight. Control: without
    the ridge the weights differ.
    """
    block = block_of(asked=16)
    index = match(block, 20, FITS["omp"])[0]
    kept, mass = (one.flatten(0, 1) for one in kept_features(block, index))
    for phi, wanted in zip(kept, mass, strict=True):
        flat = flat_weights(phi, wanted)
        best = naive_values(phi, wanted[:, None], flat[:, None], 0.1)[:, 0].clamp(math.exp(-7), math.exp(7))
        ours = pursuit_weights(phi, wanted, 7.0)
        torch.testing.assert_close(ours, best, atol=1e-9, rtol=0)
        tally("am, fitted numbers", len(best))
        assert float((phi @ ours - wanted).norm()) < 0.7 * float((phi @ flat - wanted).norm())
        assert float((paper_weights(phi, wanted, 7.0, 0) - ours).abs().max()) > 0.1


# ---- degenerate cases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("asked", [1, 5, 48])
def test_equal_keys_and_few_queries_do_not_fail(name: str, asked: int) -> None:
    """Singular systems: all keys are equal, or there are fewer queries than entries. Results are finite and bounded."""
    block = block_of(asked=asked)
    same = replace(block, keys=block.keys[:, :, :1].expand_as(block.keys), bias=torch.zeros_like(block.bias))
    for one in (block, same):
        index, bias, values = match(one, 20, FITS[name])
        assert bool(bias.isfinite().all()) and bool(values.isfinite().all()) and index.shape == (2, 2, 20)
        assert (bias - one.bias.gather(2, index)).abs().max() <= 7 + 1e-5
    index, bias, _ = match(same, 20, Fit())
    assert torch.equal(index[0, 0], torch.arange(20))  # the earlier of two equal scores
    torch.testing.assert_close(bias[0], torch.full((2, 20), math.log(2.0)), atol=1e-5, rtol=0)  # 40 instead of 20


@pytest.mark.parametrize("which", ["keys", "values", "queries"])
def test_inputs_that_are_not_finite_are_an_error(which: str) -> None:
    block = block_of()
    broken = getattr(block, which).clone()
    broken[0, 1, 3, 2] = float("nan")
    with pytest.raises(NotFiniteError):
        match(replace(block, **{which: broken}), 20, Fit())


@pytest.mark.parametrize("name", FITS)
def test_the_papers_solvers_follow_its_appendix(name: str) -> None:
    """C.2. Keys of most attention: least squares in the box of 3, then two projected steps. Pursued keys: no step, and
    w <= e^7, so that biases leave the box of 3 where the least squares does.
    """
    block = block_of(rows=1, asked=30)
    index = match(block, 12 if name == "attention" else 28, Fit())[0]
    kept, mass = kept_features(block, index)
    free = torch.linalg.lstsq(kept, mass[..., None]).solution[..., 0]
    assert name == "attention" or float(free.min()) < 0, "control: where a weight is clamped, steps would move others"
    bias = refit(block, index, replace(FITS[name], paper=True))[0] - block.bias.gather(2, index)
    if name == "omp":
        torch.testing.assert_close(bias.exp(), free.clamp(math.exp(-7), math.exp(7)).float(), atol=1e-3, rtol=1e-3)
    else:
        assert float(bias.abs().max()) <= 3 + 1e-5
        assert (bias.exp() - free.clamp(math.exp(-3), math.exp(3))).abs().max() < 1.0
    x = kept[0, 0] / kept[0, 0].sum(-1, keepdim=True)
    y = torch.randn(len(x), 4, dtype=torch.float64)
    torch.testing.assert_close(paper_values(x, y), torch.linalg.lstsq(x, y).solution, atol=1e-8, rtol=0)


def test_the_papers_biases_of_pursued_keys_leave_the_box_of_three() -> None:
    """One key that stands for 40 equal ones gets log 40 = 3.69; the box of 3 would pin it."""
    block = block_of(rows=1, entries=44, asked=30)
    keys = block.keys.clone()
    keys[:, :, 4:] = keys[:, :, 4:5]
    same = replace(block, keys=keys, bias=torch.zeros(1, 2, 44), competing=torch.ones(1, 1, 44, dtype=torch.bool))
    index = torch.arange(5).expand(1, 2, 5)
    bias, _ = refit(same, index, Fit("omp", paper=True))
    torch.testing.assert_close(bias[..., 4], torch.full((1, 2), math.log(40)), atol=1e-4, rtol=0)
    boxed, _ = refit(same, index, Fit(paper=True))
    assert float(boxed.max()) == pytest.approx(3.0)
