"""DMS in the hf engine. When a token arrives, a gate decides for each kv head if the token will be evicted when it
leaves the window. Gates decide in decoding as in training, and replay evicts the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from judging import same, trainer_gap, wrong_traces
from learned import with_scorers
from tiny import model_of, prompts_of

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.interface import NO_MASK
from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.dms import GatedView
from sparse_rl.policies import make_policy
from sparse_rl.trace import NEVER, EvictionTrace
from trainer.grpo.metrics import held_entries

LENGTHS = (1, 7, 20, 70)
SCORERS: dict[str, Any] = {
    "linear": {"name": "linear"},
    "mlp": {"name": "mlp"},
    "mlstm": {"name": "mlstm", "readout": "immediate", "chunk": 16},
}


def gated(scorer: str, **parameters: Any) -> Any:
    return make_policy("dms", **{"window": 5, "sinks": 2, "bias": 0.1, "scorer": SCORERS[scorer], **parameters})


@pytest.mark.parametrize("prefill", ["dense", "masked"])
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("family", ["qwen3", "quickstart"])
@pytest.mark.few(4)
def test_decoding_gates_equal_training_gates(family: str, scorer: str, prefill: str, tally: Callable) -> None:
    """And the definition: a token with an open gate is evicted when it leaves the window. Control: wrong traces."""
    policy = gated(scorer, prefill=prefill)
    model = with_scorers(model_of(family), policy)
    engine = make_engine("hf", model=model, policy=policy)
    rollouts = engine.generate(prompts_of(family, LENGTHS), SamplingConfig(30, seed=1, n=2, ignore_eos=True))
    true_gap = trainer_gap(model, rollouts)
    assert true_gap <= 1e-5
    for name, with_wrong_trace in wrong_traces(rollouts).items():
        wrong_gap = trainer_gap(model, with_wrong_trace)
        assert wrong_gap >= max(100 * true_gap, 1e-3 if family == "quickstart" else 0.0), name
    counts = torch.stack([r.trace.kept_counts().float() for r in rollouts])
    assert counts.std(-1).max() > 1  # the kv heads differ
    for r in rollouts:
        tokens, prompt = [*r.prompt_ids, *r.completion_ids], len(r.prompt_ids)
        prompts = torch.tensor([prompt]) if prefill == "dense" else None
        view = Decided(model.cache_scorers, policy.config, torch.tensor([len(tokens)]), prompts=prompts)
        with torch.no_grad():
            model(input_ids=torch.tensor([tokens]), attention_mask=NO_MASK, kv_view=view, use_cache=False)
        ours = EvictionTrace.recorded(torch.cat([view.decided[i] for i in range(len(view.decided))])).evict_at
        assert torch.equal(ours, r.trace.evict_at)
        last = len(tokens) - 2
        for layer, logits in enumerate(view.logits):
            for head in range(logits.shape[1]):
                for token in range(len(tokens)):
                    evicted_at = max(token + policy.config.window, prompt if prefill == "dense" else 0)
                    is_open = token >= policy.config.sinks and float(logits[0, head, token]) > 0
                    expected = evicted_at if is_open and evicted_at <= last else NEVER
                    assert int(r.trace.evict_at[layer, head, token]) == expected
        tally("dms", ours.numel(), gap=true_gap)
        assert float(torch.stack(list(view.retained.values())).mean()) == pytest.approx(r.trace.retention())


class Decided(GatedView):
    """The training view with hard gates, which also records its evictions and the gates' logits."""

    def evict_at(self, logits: torch.Tensor, may_go: torch.Tensor, goes_at: torch.Tensor) -> torch.Tensor:
        result = super().evict_at(logits, may_go, goes_at)
        self.__dict__.setdefault("decided", {})[len(self.__dict__.get("decided", {}))] = result
        self.__dict__.setdefault("logits", []).append(logits)
        return result


def test_rows_do_not_depend_on_the_batch_and_need_less_memory_than_a_full_cache() -> None:
    """The peak is below 0.8 of the full cache's, as it grows with the longest head, not with the text."""
    policy = gated("mlp", bias=1.0)
    model, prompts = with_scorers(model_of("qwen3"), policy), prompts_of("qwen3", LENGTHS)
    sampling = SamplingConfig(120, seed=1, n=2)
    engine = make_engine("hf", model=model, policy=policy)
    together = engine.generate(prompts, sampling)
    for i, prompt in enumerate(prompts):
        assert same(engine.generate([prompt], sampling), together[2 * i : 2 * i + 2])
    engine.generate(prompts, SamplingConfig(120, seed=1, ignore_eos=True))
    gates, full = engine.peak_cache_bytes, make_engine("hf", model=model, policy="full")
    full.generate(prompts, SamplingConfig(120, seed=1, ignore_eos=True))
    assert gates < 0.8 * full.peak_cache_bytes


def test_held_entries_are_the_mean_over_kv_heads() -> None:
    """Their peaks are counted in the trace query by query. The longest head holds more."""
    policy = gated("mlp", bias=1.0)
    model = with_scorers(model_of("qwen3"), policy)
    rollouts = make_engine("hf", model=model, policy=policy).generate(
        prompts_of("qwen3", LENGTHS), SamplingConfig(60, seed=1, ignore_eos=True)
    )
    for r, held in zip(rollouts, held_entries(rollouts, policy), strict=True):
        queries = range(len(r.prompt_ids), len(r.trace) - 1)
        peaks = torch.stack([r.trace.kept_counts(query) for query in queries]).amax(0).double()
        assert held == max(len(r.prompt_ids), math.ceil(float(peaks.mean())))
        assert peaks.max() > peaks.mean()


def test_with_all_gates_closed_dms_equals_a_full_cache() -> None:
    policy = gated("mlp", bias=-100.0)
    model, prompts = with_scorers(model_of("qwen3"), policy), prompts_of("qwen3", LENGTHS)
    sampling = SamplingConfig(40, seed=1, ignore_eos=True)
    rollouts = make_engine("hf", model=model, policy=policy).generate(prompts, sampling)
    assert all((r.trace.evict_at == NEVER).all() for r in rollouts)
    assert same(rollouts, make_engine("hf", model=model, policy="full").generate(prompts, sampling))


def test_soft_gates_at_a_low_temperature_equal_hard_gates() -> None:
    """Control: at temperature 1 they differ. A layer that is computed again has the same noise; gradients reach every
    gate."""
    policy = gated("linear").config
    model = with_scorers(model_of("qwen3"), gated("linear"))
    ids, lengths, prompts = torch.tensor(prompts_of("qwen3", [40])), torch.tensor([40]), torch.tensor([9])

    retained: dict[float | None, float] = {}

    def logits(temperature: float | None) -> torch.Tensor:
        view = GatedView(model.cache_scorers, policy, lengths, prompts=prompts, temperature=temperature)
        view._noise = {i: torch.zeros(1, 2, 40) for i in range(2)}
        logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
        retained[temperature] = float(torch.stack(list(view.retained.values())).mean())
        return logits

    hard = logits(None)
    assert (logits(1e-4) - hard).abs().max() <= 1e-4 < (logits(1.0) - hard).abs().max()
    assert retained[1e-4] == pytest.approx(retained[None]) != pytest.approx(retained[1.0])
    view = GatedView(model.cache_scorers, policy, lengths, prompts=prompts, temperature=1.0)
    inputs = {"input_ids": ids, "attention_mask": NO_MASK, "kv_view": view, "use_cache": False}
    # a recomputed layer has the same noise, whatever the state of the random generator
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.cache_scorers.requires_grad_(True)
    logits(1.0).square().sum().backward()
    assert all(w.grad.abs().max() > 0 for s in model.cache_scorers for n, w in s.named_parameters() if n != "alpha")


def slow_gates(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stays: torch.Tensor, window: int, prompts: list[int]
) -> torch.Tensor:
    """Return attention with logits biased by log(1 - alpha), query by query, from `window` queries after a token on."""
    out = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for row, prompt in enumerate(prompts):
        for head in range(query.shape[1]):
            for q in range(query.shape[2]):
                late = torch.tensor([q - t >= window and q >= prompt for t in range(q + 1)])
                bias = torch.where(late, stays[row, head // group, : q + 1], 0.0)
                logits = key[row, head // group, : q + 1] @ query[row, head, q] * 0.3 + bias
                out[row, head, q] = logits.softmax(0) @ value[row, head // group, : q + 1]
    return out


def test_soft_gates_computed_in_chunks_equal_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and all gradients, up to 1e-12. Control: a longer window gives other outputs."""
    policy, lengths, prompts = gated("linear", sinks=0).config, [21, 15], [9, 0]
    generator = torch.Generator().manual_seed(0)
    *tensors, scores = (
        torch.randn(2, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((4, 21, 8), (2, 21, 8), (2, 21, 8), (2, 21))
    )
    real = (torch.arange(21) < torch.tensor(lengths)[:, None])[:, None, :, None]
    weight = torch.randn(2, 4, 21, 8, generator=generator, dtype=torch.float64) * real
    stays = torch.nn.functional.logsigmoid(-(scores + policy.bias) / 0.7)
    results = {}
    for name, window in (("plain", policy.window), ("control", policy.window + 1)):
        out = slow_gates(*tensors, stays, window, prompts)
        gradients = torch.autograd.grad((out * weight).sum(), (*tensors, scores), retain_graph=True)
        results[name] = ((out * weight).detach(), *gradients)
    for chunk in (4, 7, 256):
        monkeypatch.setattr("sparse_rl.methods.kvpop.dms.CHUNK", chunk)
        settings = {"prompts": torch.tensor(prompts), "temperature": 0.7}
        view = GatedView([lambda *_: (scores, torch.zeros(2))], policy, torch.tensor(lengths), **settings)
        view._noise = {0: torch.zeros(2, 2, 21)}
        out = view.attend(0, *tensors, 0.3)
        ours = ((out * weight).detach(), *torch.autograd.grad((out * weight).sum(), (*tensors, scores)))
        for ours_part, plain, control in zip(ours, results["plain"], results["control"], strict=True):
            assert float((ours_part - plain).abs().max()) < 1e-12 < 1e-4 < float((ours_part - control).abs().max())


def test_invalid_gated_policies_are_refused() -> None:
    with pytest.raises(UserError, match="scorer: a gate must decide as soon as its token arrives"):
        make_policy("dms", scorer="mlstm")
    with pytest.raises(UserError, match="the model has no scorers, which dms needs"):
        make_engine("hf", model=model_of("qwen3"), policy=gated("mlp"))
