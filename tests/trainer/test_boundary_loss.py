"""KVpop's boundary loss and its gradient, compared with a plain loop over queries without a running top-k."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_rl.kernels import running_topk
from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.methods.kvpop.loss import BoundaryLoss
from sparse_rl.methods.kvpop.view import LayerTarget

B, H, S, SINKS, WINDOW, K = 3, 2, 60, 2, 5, 7
LENGTHS = torch.tensor([60, 31, 10])


def tensors(ties: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scores and the target, each [B, H, S], and log gamma [H], for B rows, H heads and S positions."""
    generator = torch.Generator().manual_seed(0)
    scores, target = (torch.randn(B, H, S, generator=generator, dtype=torch.float64) for _ in range(2))
    if ties:
        target = (target * 2).round()
    return scores, target * 2, torch.tensor([-0.02, -0.3], dtype=torch.float64)


def loop(loss: BoundaryLoss, scores: Any, target: Any, log_decay: Any, n: int, queries: Any) -> torch.Tensor:
    """Compute the loss one query, head and row at a time, in float64."""
    results = []
    for row in range(B):
        for head in range(H):
            for q in queries[row].tolist():
                if q < 0:
                    continue

                def at(values: torch.Tensor, t: int, q: int = q, row: int = row, head: int = head) -> torch.Tensor:
                    return values[row, head, t] + (q // n - t // n) * log_decay[head]

                eligible = sorted(range(SINKS, q - WINDOW + 1), key=lambda t: -float(at(target, t).detach()))  # stable
                kept, new = eligible[:K], q - WINDOW
                assert len(eligible) > K or q == SINKS + WINDOW + K - 1
                boundary, y = kept[-1], 1.0 if new in kept else -1.0
                if boundary == new:
                    continue
                weight = torch.tensor(1.0, dtype=torch.float64)
                if loss.config.margin:
                    margin = y * (at(target, new) - at(target, boundary)).detach()
                    assert margin >= -1e-12
                    weight = (
                        loss.config.margin_floor
                        + (1 - loss.config.margin_floor) * (margin / loss.config.margin_temperature).sigmoid()
                    )
                lead = at(scores, new) - at(scores, boundary)
                results.append((head, y, weight, torch.nn.functional.softplus(-y * lead / loss.config.temperature)))
    balance = []
    for head, y, _, _ in results:
        labels = [other[1] for other in results if other[0] == head]
        share = labels.count(y) / len(labels)
        balance.append(min(max(0.5 / share, loss.config.balance_min), loss.config.balance_max))
    mean = sum(balance) / len(balance)
    return torch.stack(
        [b / mean * margin * item for b, (*_, margin, item) in zip(balance, results, strict=True)]
    ).mean()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"margin": False},
        {"temperature": 0.5, "margin_floor": 0.3, "margin_temperature": 2.0},
        {"balance_max": 1.1},
        {"balance_min": 0.9},
    ],
)
@pytest.mark.few(8)
def test_the_loss_and_its_gradients_equal_the_loop(options, n, ties):
    loss = BoundaryLoss(BoundaryConfig(queries=None, **options))
    scores, target, log_decay = tensors(ties)
    best = running_topk(target, SINKS, window=WINDOW, k=K, log_decay=log_decay, decay_every=n, lengths=LENGTHS)
    queries = loss.draw(LENGTHS, SINKS + WINDOW + K, S)
    assert (queries[2] == -1).all()
    assert queries[1].max() == 30
    assert (queries[0] >= 0).sum() == S - SINKS - WINDOW - K
    pairs = loss.pairs(LayerTarget(target, best), log_decay, queries, window=WINDOW, decay_every=n)
    gradients = []
    for value in (lambda s, g: loss(s, g, pairs, decay_every=n), lambda s, g: loop(loss, s, target, g, n, queries)):
        s, g = scores.clone().requires_grad_(), log_decay.clone().requires_grad_()
        computed = value(s, g)
        computed.backward()
        gradients.append((computed.detach(), s.grad, g.grad))
    for actual, expected in zip(*gradients, strict=True):
        assert torch.allclose(actual, expected, atol=1e-6, rtol=1e-5)
    assert gradients[0][1].abs().max() > 1e-4  # scores and gamma get gradients
    assert gradients[0][2].abs().min() > 1e-6


@pytest.mark.parametrize("balance", [{}, {"balance_max": 1.1}, {"balance_min": 0.9}, {"balance_min": 1.0}], ids=str)
def test_the_balance_has_mean_1_and_is_applied_before_the_margins(balance):
    """The weights by the margin come after the balance, which therefore does not cancel them."""
    _, target, log_decay = tensors()
    best = running_topk(target, SINKS, window=WINDOW, k=K, log_decay=log_decay, lengths=LENGTHS)

    def pairs(scale: float = 1.0, **options: Any) -> Any:
        """Return the pairs when all margins, in the target and in the decayed scores, are multiplied by `scale`."""
        loss = BoundaryLoss(BoundaryConfig(queries=None, **balance, **options))
        queries = loss.draw(LENGTHS, SINKS + WINDOW + K, S)
        scaled = LayerTarget(target * scale, best)
        return loss.pairs(scaled, log_decay * scale, queries, window=WINDOW, decay_every=1)

    balanced, floor = pairs(margin=False), 0.2
    real = balanced.weight > 0
    assert float(balanced.weight[real].mean()) == pytest.approx(1, abs=1e-6)
    for head in range(H):
        kept, dropped = (balanced.weight[:, head][real[:, head] & (balanced.label[:, head] == y)] for y in (1, -1))
        assert kept.unique().numel() == dropped.unique().numel() == 1
        assert len(kept) != len(dropped)
        rarer = kept[0] > dropped[0]
        assert bool(rarer) == (len(kept) < len(dropped)) or balance.get("balance_min") == 1.0
        if not balance:
            assert float(kept.sum()) == pytest.approx(float(dropped.sum()), rel=1e-5)
    weighted = pairs(margin_floor=floor)
    share = weighted.weight[real] / balanced.weight[real]
    assert share.min() >= floor + (1 - floor) / 2 - 1e-6
    assert share.max() <= 1 + 1e-6
    assert share.mean() < 0.95
    assert torch.equal(weighted.weight > 0, real)
    certain, uncertain = (float(pairs(scale, margin_floor=floor).weight[real].mean()) for scale in (1e6, 1e-6))
    assert certain == pytest.approx(1, abs=1e-3)
    assert uncertain == pytest.approx(floor + (1 - floor) / 2, abs=1e-3)


def test_the_loss_falls_as_the_scores_approach_the_target():
    loss = BoundaryLoss(BoundaryConfig(queries=None))
    scores, target, log_decay = tensors()
    best = running_topk(target, SINKS, window=WINDOW, k=K, log_decay=log_decay, lengths=LENGTHS)
    queries = loss.draw(LENGTHS, SINKS + WINDOW + K, S)
    pairs = loss.pairs(LayerTarget(target, best), log_decay, queries, window=WINDOW, decay_every=1)
    values = [float(loss(scores * (1 - a) + target * a, log_decay, pairs, decay_every=1)) for a in (0, 0.5, 1)]
    assert values[0] > values[1] > values[2]


def test_queries_are_drawn_uniformly_and_from_late_positions():
    torch.manual_seed(0)
    drawn = BoundaryLoss(BoundaryConfig(queries=4000, late=0.5)).draw(LENGTHS, 14, S)
    assert drawn.shape == (B, 4000)
    assert (drawn[2] == -1).all()
    for row in (0, 1):
        assert drawn[row].min() == 14
        assert drawn[row].max() == LENGTHS[row] - 1
    late, uniform = drawn[0, :2000].float().mean(), drawn[0, 2000:].float().mean()
    assert abs(uniform - (14 + 59) / 2) < 1
    assert abs(late - (14 + 46 * 2 / 3)) < 1
    assert torch.equal(
        BoundaryLoss(BoundaryConfig(late=0.0, queries=None)).draw(LENGTHS, 60, S), torch.full((B, S), -1)
    )


def test_without_pairs_the_loss_is_zero_and_not_nan():
    loss = BoundaryLoss(BoundaryConfig(queries=8))
    scores, target, log_decay = tensors()
    short = torch.tensor([9, 9, 9])
    best = running_topk(target, SINKS, window=WINDOW, k=K, log_decay=log_decay, lengths=short)
    queries = loss.draw(short, SINKS + WINDOW + K, S)
    pairs = loss.pairs(LayerTarget(target, best), log_decay, queries, window=WINDOW, decay_every=1)
    scores.requires_grad_()
    result = loss(scores, log_decay, pairs, decay_every=1)
    result.backward()
    assert float(result) == 0
    assert (scores.grad == 0).all()
