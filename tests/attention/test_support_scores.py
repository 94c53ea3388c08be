"""Scores of drawn tokens among their kept tokens, and their gradients, against a plain reference with whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_rl.attention import support
from sparse_rl.attention.support import DrawScores, score_draws

N, V, WIDTH = 37, 211, 24
SCALE = 1 / 0.7


def made(bias: bool, only: int | None = None) -> tuple[Tensor, torch.nn.Linear, Tensor, Tensor, Tensor]:
    """Return hidden states, a head, drawn tokens, and the sets that they were drawn from, of 1 token up to all.

    only : the size of each set
    """
    torch.manual_seed(0)
    hidden, head = torch.randn(N, WIDTH, requires_grad=True), torch.nn.Linear(WIDTH, V, bias=bias)
    torch.nn.init.normal_(head.weight, std=0.3)
    sizes = torch.tensor([(1, 1, 1, 2, 5, 60, V, 0)[draw % 8] if only is None else only for draw in range(N)])
    kept = [torch.randperm(V)[:size].sort().values.int() for size in sizes.tolist()]
    labels = torch.stack([(ids if len(ids) else torch.arange(V))[torch.randint(len(ids) or V, ())] for ids in kept])
    return hidden, head, labels.long(), sizes, torch.cat(kept)


def reference(hidden: Tensor, head: torch.nn.Linear, labels: Tensor, sizes: Tensor, ids: Tensor) -> DrawScores:
    """Mask whole logits, one draw after the other."""
    rows = []
    for state, label, kept in zip(hidden, labels, ids.split(sizes.tolist()), strict=True):
        logits = head(state) * SCALE
        among = logits[kept.long()] if len(kept) else logits
        place = int((kept == label).nonzero()) if len(kept) else int(label)
        logp = among.log_softmax(-1)
        rows.append((logp[place], logits.log_softmax(-1)[label].detach(), -(logp.exp() * logp).sum()))
    return DrawScores(*(torch.stack(column) for column in zip(*rows, strict=True)))


def gradients(score: Callable[..., DrawScores], hidden: Tensor, head: Any, *draws: Tensor) -> list[Tensor]:
    """Return the gradients of a weighted sum of log-probs and entropies."""
    scores = score(hidden, head, *draws)
    weights = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    total = (torch.stack([scores.kept, scores.entropy]) * weights).sum()
    return list(torch.autograd.grad(total, [hidden, *head.parameters()]))


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("tile", [1, 5 * V, 2**25], ids=["one draw a tile", "ragged tiles", "one tile"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_scores_and_gradients_are_those_of_whole_logits(bias, tile, monkeypatch):
    """Controls: without one kept token, with another draw's set, or at another temperature, they differ."""
    monkeypatch.setattr(support, "TILE", tile)
    hidden, head, labels, sizes, ids = draws = made(bias)

    def scored(*given: Any) -> DrawScores:
        return score_draws(*given, scale=SCALE)

    for ours, theirs in zip(scored(*draws), reference(*draws), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6)
    assert (scored(*draws).kept[sizes == 1] == 0).all()
    expected = gradients(reference, *draws)
    assert distance(gradients(scored, *draws), expected) <= 7e-7

    several = int((sizes > 2).nonzero()[0])
    first = int(sizes[:several].sum())
    other = first + int(ids[first] == labels[several])  # a kept token that was not drawn
    fewer = sizes.clone()
    fewer[several] -= 1
    dropped = (hidden, head, labels, fewer, torch.cat([ids[:other], ids[other + 1 :]]))
    assert distance(gradients(scored, *dropped), expected) > 1e-4
    assert distance(gradients(score_draws, *draws), expected) > 1e-2
    absent = (hidden, head, (labels + 1) % V, sizes, ids)
    assert scored(*absent).kept.isneginf().any()


def test_a_draw_whose_only_token_is_its_own_has_no_gradient():
    draws = made(True, only=1)
    assert all((gradient == 0).all() for gradient in gradients(score_draws, *draws))


def test_without_draws_the_gradients_are_0():
    hidden, head, labels, *_ = made(True)
    none = torch.zeros(0, dtype=torch.int64)
    scores = score_draws(hidden[:0], head, labels[:0], none, none.int())
    (gradient,) = torch.autograd.grad(scores.kept.sum() + scores.entropy.sum(), head.weight)
    assert gradient.shape == head.weight.shape
    assert (gradient == 0).all()


def test_under_autocast_the_head_computes_in_its_dtype():
    """As the model's own forward does. Control: in float32 the scores differ."""
    hidden, head, labels, *_ = draws = made(True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = score_draws(*draws, scale=SCALE)
    assert ours.kept.dtype == torch.float32
    plain = score_draws(*draws, scale=SCALE)
    logits = torch.autocast("cpu", torch.bfloat16)(head)(hidden).float() * SCALE
    expected = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(ours.whole, expected, rtol=0, atol=1e-6)
    assert (plain.whole - expected).abs().max() > 1e-3
