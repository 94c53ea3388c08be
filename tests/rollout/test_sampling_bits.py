"""The sampler sorts only a prefix of the tokens, and equals its plain reference bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

import rollout.sampling
from rollout import SamplingConfig
from rollout.sampling import ranking, sample, sample_reference, truncate, truncate_reference
from sparse_rl.trace.support import unpacked

KINDS = ["random", "flat", "peaked", "tied", "coarse", "impossible", "all but one"]
TOP_P = [1.0, 1e-30, 1e-6, 0.5, 0.9, 1 - 1e-12]


def logits_of(kind: str, rows: int, size: int, seed: int = 0) -> torch.Tensor:
    """Return random logits float32 [rows, size] of a kind that is hard for a sampler: ties, zeros, -inf."""
    logits = 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    best = torch.arange(rows)[:, None] % size
    return {
        "random": lambda: logits,
        "flat": lambda: torch.zeros_like(logits),
        "peaked": lambda: logits.scatter(-1, best, 60.0),
        "tied": lambda: logits.round(),
        "coarse": lambda: logits.bfloat16().float(),
        "impossible": lambda: logits.masked_fill(logits > 1, float("-inf")).scatter(-1, best, 0.0),
        "all but one": lambda: torch.full_like(logits, float("-inf")).scatter(-1, best, 1.0),
    }[kind]()


def uniforms_for(processed: torch.Tensor) -> torch.Tensor:
    """Return uniforms float64 [B]: ends of the unit interval, borders between two tokens, or numbers next to them."""
    cdf = processed.double().exp().cumsum(-1)
    rows, size = cdf.shape
    token = torch.randint(size, (rows, 1), generator=torch.Generator().manual_seed(0))
    border = (cdf.gather(-1, token) / cdf[:, -1:])[:, 0].clamp(max=1 - 2**-53)
    # the number before the border, the border, and the next number
    uniform = border.nextafter(torch.arange(rows) % 3 - 1 + border)
    uniform[:3] = torch.tensor([0.0, 0.5, 1 - 2**-53])
    return uniform.clamp(0, 1 - 2**-53)


def same(ours: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("size", [1, 15, 130, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_equals_its_reference_for_all_settings(kind: str, size: int) -> None:
    logits = logits_of(kind, 12, size)
    for top_k, top_p in itertools.product([None, 1, 15, 65, size, 2 * size], TOP_P):
        min_p = {1: 0.2, 65: 0.01}.get(top_k, 0.0)
        temperature = 0.7 if top_k == 15 else 1.0
        sampling = SamplingConfig(1, temperature, top_p=top_p, top_k=top_k, min_p=min_p, record_support=True)
        logprobs, cut = (logits / sampling.temperature).log_softmax(-1), (top_p, top_k, min_p)
        processed = truncate_reference(logprobs, *cut) if sampling.truncated_support else logprobs
        assert torch.equal(truncate(logprobs, *cut), truncate_reference(logprobs, *cut))
        uniform = uniforms_for(processed)
        sampled = sample(logits, sampling, uniform)
        assert same(sampled, sample_reference(logits, sampling, uniform)), sampling
        assert len(sampled) == 3 + sampling.truncated_support
        if sampling.truncated_support:
            kept = processed > float("-inf")
            assert torch.equal(unpacked(sampled[3], kept.sum(-1)), kept.nonzero()[:, 1].int())
            assert bool(kept.gather(-1, sampled[0][:, None]).all())


def test_the_sampler_equals_its_reference_over_a_large_vocabulary() -> None:
    logits = torch.cat([logits_of("random", 2, 70_001), logits_of("coarse", 2, 70_001)])
    for setting in ({}, {"top_k": 20}, {"top_k": 1000, "top_p": 0.9}, {"top_p": 0.95}, {"min_p": 0.1}):
        uniform = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        sampling = SamplingConfig(1, **setting)
        assert same(sample(logits, sampling, uniform), sample_reference(logits, sampling, uniform)), setting


def borders(logprobs: torch.Tensor, top_k: int) -> torch.Tensor:
    """Mass before each token that top-k keeps, except the first, for one row [1, V]; rounded as in the reference."""
    ranked = logprobs.sort(dim=-1, descending=True).values
    ranked[:, top_k:] = float("-inf")
    mass = ranked.log_softmax(-1).exp()
    before = (mass.cumsum(-1) - mass)[0, 1:top_k]
    return before[(before > 0) & (before < 0.999)]


def test_top_p_at_the_border_of_a_token_cuts_as_the_reference_does() -> None:
    """The last bit decides if the token is kept. Control: the next larger float."""
    for top_k in range(2, 40):
        logprobs = logits_of("random", 1, 200, seed=top_k).log_softmax(-1)
        borders_of_row = borders(logprobs, top_k)
        for top_p, next_number in zip(
            borders_of_row.tolist(), borders_of_row.nextafter(torch.tensor(2.0)).tolist(), strict=True
        ):
            expected = truncate_reference(logprobs, top_p, top_k)
            assert torch.equal(truncate(logprobs, top_p, top_k), expected)
            assert not torch.equal(truncate(logprobs, next_number, top_k), expected)


@pytest.mark.parametrize("is_cpu", [True, False], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 300])
def test_the_ranking_is_that_of_a_stable_sort(
    kind: str, size: int, is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between 0.0 and -0.0. The code for a CPU and that for a GPU are both tested."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", is_cpu)
    logprobs = logits_of(kind, 5, size).log_softmax(-1)
    logprobs[0] = torch.where(torch.arange(size) % 2 == 0, 0.0, -0.0)
    order = logprobs.sort(dim=-1, descending=True, stable=True).indices
    for count in {1, min(3, size), size}:
        assert torch.equal(ranking(logprobs, count), order[:, :count])


def test_ties_at_the_border_go_to_the_earlier_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a ranking that puts the later of two equal tokens first."""
    logprobs = logits_of("tied", 4, 130).log_softmax(-1)
    assert torch.equal(truncate(logprobs, 0.9, 20), truncate_reference(logprobs, 0.9, 20))

    def later_first(logprobs: torch.Tensor, count: int) -> torch.Tensor:
        return 129 - logprobs.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :count]

    monkeypatch.setattr(rollout.sampling, "ranking", later_first)
    assert not torch.equal(truncate(logprobs, 0.9, 20), truncate_reference(logprobs, 0.9, 20))


@pytest.mark.parametrize("setting", [{}, {"temperature": 0}, {"top_k": 9, "top_p": 0.8}, {"top_p": 0.8}], ids=str)
def test_rows_sampled_in_parts_equal_rows_sampled_together(setting: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with forced tokens in some rows."""
    sampling, logits = SamplingConfig(1, **setting), logits_of("coarse", 7, 100)
    forced = torch.tensor([-1, 4, -1, -1, 99, -1, 0])
    uniform = torch.rand(7, dtype=torch.float64) if sampling.temperature else None
    expected = sample_reference(logits, sampling, uniform, forced)
    for at_once in (1, 100, 250, 700):
        monkeypatch.setattr(rollout.sampling, "AT_ONCE", at_once)
        assert same(sample(logits, sampling, uniform, forced), expected)


@pytest.mark.parametrize(
    "setting",
    [{}, {"temperature": 0.7}, {"temperature": 0}, {"top_k": 9}, {"top_k": 9, "top_p": 0.8}, {"top_p": 0.8}],
    ids=str,
)
def test_sampling_does_not_wait_for_the_device(setting: dict) -> None:
    """Meta tensors have no values. Control: reading a value fails."""
    logits = torch.empty(3, 200, device="meta")
    sampling = SamplingConfig(1, **setting)
    uniform = torch.empty(3, dtype=torch.float64, device="meta") if sampling.temperature else None
    forced = torch.empty(3, dtype=torch.int64, device="meta")
    assert [x.shape for x in sample(logits, sampling, uniform, forced)] == [(3,)] * 3
    with pytest.raises(RuntimeError, match="meta"):
        logits.isnan().any().item()
