"""Reference implementations of Attention Matching for tests: one head and one entry at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def naive_pursuit(phi: Tensor, count: int, bound: float = 7.0) -> tuple[list[int], Tensor]:
    """Choose `count` entries by orthogonal matching pursuit (AM algorithm 1 with the pruning of C.2).

    If chosen entries have log w < -bound, they are discarded, and the selection continues. phi, [n, N], are the
    features of N entries for n reference queries. Returns the entries in order of choice, and their weights w, [count].
    """
    mass, chosen, discarded, weights = phi.sum(-1), list[int](), set[int](), torch.zeros(0)
    current = torch.zeros_like(mass)
    while True:
        while len(chosen) < count:
            best, highest = -1, -math.inf
            for entry in range(phi.shape[1]):
                agreement = float(phi[:, entry] @ (mass - current))
                if entry not in chosen and entry not in discarded and agreement > highest:
                    best, highest = entry, agreement
            chosen.append(best)
            current, weights = _mass_and_weights(phi, chosen, bound)
        poor = _poor(chosen, weights, phi.shape[1] - len(discarded) - count, bound)
        if not poor:
            return chosen, weights
        discarded.update(poor)
        chosen = [entry for entry in chosen if entry not in poor]
        current, weights = _mass_and_weights(phi, chosen, bound)


def naive_fast_pursuit(
    phi: Tensor, count: int, k: int = 4, tau: int = 2, bound: float = 7.0
) -> tuple[list[int], Tensor]:
    """Choose `count` entries by the fast pursuit (AM algorithm 2 with the pruning of C.2).

    Each iteration u chooses k entries, and the weights are fitted after every `tau` iterations and after the last one.
    The algorithm as printed takes `count` iterations; count / k of them choose `count` entries. If k does not divide
    `count`, the last iteration chooses fewer than k entries. After a pruning, u counts from 1 again. Arguments and
    result are those of `naive_pursuit`.
    """
    mass, chosen, discarded, weights = phi.sum(-1), list[int](), set[int](), torch.zeros(0)
    missing = mass
    while True:
        iterations = math.ceil((count - len(chosen)) / k)
        for u in range(1, iterations + 1):
            agreement = {}
            for entry in range(phi.shape[1]):
                if entry not in chosen and entry not in discarded:
                    agreement[entry] = float(missing @ phi[:, entry])
            best = sorted(agreement, key=lambda entry: -agreement[entry])  # used in this iteration only
            chosen += best[: min(k, count - len(chosen))]
            if u % tau == 0 or u == iterations:
                fitted, weights = _mass_and_weights(phi, chosen, bound)
                missing = mass - fitted
        poor = _poor(chosen, weights, phi.shape[1] - len(discarded) - count, bound)
        if not poor:
            return chosen, weights
        discarded.update(poor)
        chosen = [entry for entry in chosen if entry not in poor]
        fitted, weights = _mass_and_weights(phi, chosen, bound)
        missing = mass - fitted


def _poor(chosen: list[int], weights: Tensor, spare: int, bound: float) -> list[int]:
    """Return the chosen entries with log w < -bound, but at most the last `spare` of them."""
    poor = [entry for entry, weight in zip(chosen, weights, strict=True) if weight < math.exp(-bound)]
    return poor[-spare:] if spare else []


def _mass_and_weights(phi: Tensor, chosen: list[int], bound: float) -> tuple[Tensor, Tensor]:
    """Return the mass [n] of the chosen entries, and their weights, by clamped least squares (algorithm 3)."""
    weights = torch.linalg.lstsq(phi[:, chosen], phi.sum(-1)[:, None], driver="gelsd").solution[:, 0]
    weights = weights.clamp(0.0, math.exp(bound))
    return phi[:, chosen] @ weights, weights


def naive_weights(kept: Tensor, mass: Tensor, bound: float, steps: int = 20_000) -> Tensor:
    """Return w = argmin |kept w - mass|^2 with |log w| <= bound, [t], by coordinate descent. `kept` is [n, t]."""
    low, high = math.exp(-bound), math.exp(bound)
    weights = torch.ones(kept.shape[1], dtype=kept.dtype)
    missing = mass - kept @ weights
    for _ in range(steps):
        before = weights.clone()
        for entry in range(len(weights)):
            column = kept[:, entry]
            best = float(weights[entry] + column @ missing / (column @ column))
            change = min(max(best, low), high) - float(weights[entry])
            missing = missing - change * column
            weights[entry] += change
        if float((weights - before).abs().max()) < 1e-12:
            break
    return weights


def naive_values(x: Tensor, y: Tensor, values: Tensor, ridge: float) -> Tensor:
    """Return the new values of `fit_values` for one head, [t, D]: the solution of one least-squares problem, whose
    rows are
    those of `x` [n, t] and, below them, those of the ridge term."""
    root = math.sqrt(ridge * float(sum(row @ row for row in x)) / len(x))
    stacked = torch.cat([x, root * torch.eye(x.shape[1], dtype=x.dtype)])
    wanted = torch.cat([y - x @ values, torch.zeros(x.shape[1], y.shape[1], dtype=y.dtype)])
    return values + torch.linalg.lstsq(stacked, wanted, driver="gelsd").solution


def naive_allocation(curves: Sequence[Callable[[float], float]], ratio: float, steps: int) -> tuple[list[float], int]:
    """Divide a budget over heads (AM algorithm 4). Returns the ratio of each head, and the number of moves.

    curves : one function per head, ratio -> loss
    ratio : the mean ratio, with which every head starts
    steps : number of steps that make up `ratio`; a move shifts one step from one head to another
    """
    held, moves, step = [steps] * len(curves), 0, ratio / steps
    heads = range(len(curves))
    while True:
        loss = [curve(held[h] * step) for h, curve in enumerate(curves)]
        raised = [(held[h] + 1) * step for h in heads]
        gains = [loss[h] - curves[h](raised[h]) if raised[h] <= 1 + 1e-9 * step else -math.inf for h in heads]
        costs = [curves[h]((held[h] - 1) * step) - loss[h] if held[h] >= 1 else math.inf for h in heads]
        taker = max(heads, key=lambda h: gains[h])
        giver = min((h for h in heads if h != taker), key=lambda h: costs[h])
        if not gains[taker] > costs[giver]:
            return [count * step for count in held], moves
        held[taker], held[giver], moves = held[taker] + 1, held[giver] - 1, moves + 1
