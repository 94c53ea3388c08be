"""Future attention mass (the attention that a token receives from later queries) equals a float64 loop over pairs, with
every option, padded and packed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sparse_rl.kernels.future import future_attention_mass

B, HQ, HKV, S, D, SCALE = 2, 4, 2, 37, 8, 0.4
ENDS = {
    "whole": None,
    "right-padded": [[S] * S, [20] * S],
    "left-padded": [[S] * S, [0] * 9 + [S] * (S - 9)],
    "packed": [[12] * 12 + [13] + [S] * (S - 13), [30] * 30 + [S] * 7],
}


def brute(q: torch.Tensor, k: torch.Tensor, ends: Any, window: int, options: dict[str, Any]) -> torch.Tensor:
    """Return the future attention m_t float64 [B, Hq, S] of each token t, summed over later queries, pair by pair.

    ends : for each token, the end of its document; queries from `window` tokens later up to there count
    """
    q, k = q.double(), k.double().repeat_interleave(HQ // HKV, dim=1)
    given_lse, look = options.get("log_sum_exp"), options.get("lookahead")
    result = torch.zeros(B, HQ, S, dtype=torch.float64)
    for b, h in itertools.product(range(B), range(HQ)):
        end = [S] * S if ends is None else ends[b]
        lse = []
        for d in range(S):
            seen = [float(q[b, h, d] @ k[b, h, t]) * SCALE for t in range(d + 1) if d < end[t]]
            own = torch.tensor(seen, dtype=torch.float64).logsumexp(0)
            lse.append(own if given_lse is None else given_lse[b, h, d])
        for t in range(S):
            last = end[t] if look is None else min(end[t], t + window + look + 1)
            queries = range(t + window, last)
            mass = sum(float((q[b, h, d] @ k[b, h, t] * SCALE - lse[d]).exp()) for d in queries)
            result[b, h, t] = mass / (max(1, len(queries)) if options.get("normalise", True) else 1)
    return result


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, HQ, S, D, generator=generator) * 2, torch.randn(B, HKV, S, D, generator=generator) * 2


@pytest.mark.parametrize("where", ENDS)
@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("option", [{}, {"lookahead": 0}, {"lookahead": 6}, {"normalise": False}, {"log_sum_exp": 1}])
@pytest.mark.few(7)
def test_future_attention_mass_equals_the_loop(where: str, window: int, option: dict) -> None:
    """For any layout, window and option, in chunks or by FlexAttention; also the maximum and mean over query heads."""
    if "log_sum_exp" in option:  # arbitrary values; no score exceeds 20
        option = {"log_sum_exp": torch.randn(B, HQ, S, generator=torch.Generator().manual_seed(1)) + 20}
    ends = ENDS[where]
    expected = brute(*tensors(), ends, window, option)
    given = {"window": window, "scaling": SCALE, "ends": None if ends is None else torch.tensor(ends), **option}
    for method in ({"chunk": 512}, {"chunk": 7}, {"kernel": "flex"}):
        mass = future_attention_mass(*tensors(), **given, **method)
        assert mass.shape == (B, HQ, S)
        assert mass.dtype == torch.float32
        assert not mass.isnan().any()
        assert torch.equal(mass == float("-inf"), expected == 0)
        assert (mass.exp() - expected).abs().max() <= 1e-5
        positive = expected > 0
        assert not positive.any() or (mass[positive] - expected[positive].log()).abs().max() <= 1e-4
    by_head = expected.view(B, HKV, -1, S)
    for group, by_group in (("max", (1e-6 + by_head).log().amax(2)), ("mean", (1e-6 + by_head.mean(2)).log())):
        joined = future_attention_mass(*tensors(), **given, group=group, floor=1e-6)
        assert joined.shape == (B, HKV, S)
        assert (joined.exp() - by_group.exp()).abs().max() <= 1e-5


def test_control_wrong_options_give_another_mass() -> None:
    expected = brute(*tensors(), None, 5, {})

    def gap(**changed: Any) -> float:
        mass = future_attention_mass(*tensors(), **{"window": 5, "scaling": SCALE, **changed})
        return float((mass.exp() - expected).abs().max())

    assert gap() <= 1e-5
    assert all(gap(**wrong) > 1e-2 for wrong in ({"window": 4}, {"scaling": 0.5}, {"lookahead": 3}))
    assert gap(ends=torch.tensor(ENDS["packed"])) > 1e-2


def test_future_attention_mass_has_no_gradient_and_is_float32() -> None:
    query, key = (tensor.clone().requires_grad_() for tensor in tensors())
    target = future_attention_mass(query, key, window=5, scaling=SCALE)
    assert not target.requires_grad
    half = future_attention_mass(query.bfloat16(), key.bfloat16(), window=5, scaling=SCALE)
    assert half.dtype == torch.float32
    assert (half.exp() - target.exp()).abs().max() < 0.05
