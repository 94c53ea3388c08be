"""Attention under evictions that KVpop's scorers decide: the mask equals the paper's, the scorers' training target is
right, and a layer that gradient checkpointing recomputes keeps its evictions.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import new_model

from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.kernels import recall, running_topk
from sparse_rl.kernels.future import attention_lse, future_attention_mass
from sparse_rl.kernels.masked import dense_attention
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.config import TargetConfig
from sparse_rl.methods.kvpop.policy import KVpop
from sparse_rl.methods.kvpop.target import FutureTarget
from sparse_rl.methods.kvpop.view import LearnedView
from sparse_rl.models.directory import attach_scorers
from sparse_rl.trace import EvictionTrace

B, HQ, HKV, S, D, SCALE = 2, 4, 2, 50, 8, 0.35
LENGTHS = torch.tensor([50, 33])


def policy(scorer: Any = "mlp", **keys: Any) -> KVpopPolicyConfig:
    return KVpopPolicyConfig(**{"budget": 14, "sinks": 2, "window": 5, "scorer": scorer, **keys})


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (HQ, HKV, HKV)
    query, key, value = (torch.randn(B, heads, S, D, generator=generator) * 2 for heads in shapes)
    return query, key, value


def papers_mask(scores: torch.Tensor, log_decay: torch.Tensor, cache: KVpopPolicyConfig) -> torch.Tensor:
    """Return the mask bool [B, Hkv, S, S], query by query: sinks, window, and the k best other tokens by score."""
    mask = torch.zeros(B, HKV, S, S, dtype=torch.bool)
    n = cache.decay_every
    for b in range(B):
        for h in range(HKV):
            for q in range(int(LENGTHS[b])):
                eligible = range(cache.sinks, q - cache.window + 1)
                worth = {t: float(scores[b, h, t]) + (q // n - t // n) * float(log_decay[h]) for t in eligible}
                kept = set(sorted(eligible, key=lambda t: -worth[t])[: cache.k])
                for t in range(q + 1):
                    mask[b, h, q, t] = t < cache.sinks or q - t < cache.window or t in kept
    return mask


@pytest.mark.parametrize("prefill", ["masked", "dense"])
@pytest.mark.parametrize("decay_every", [1, 3])
def test_learned_attention_equals_dense_attention_under_the_papers_mask(decay_every: int, prefill: str) -> None:
    """In a dense prefill, evictions show from the first query after the prompt. The reported share of retained entries
    is the trace's. Control: the causal mask."""
    cache = policy(decay_every=decay_every)
    prompts = torch.tensor([30, 33])
    query, key, value = tensors()
    scores, log_decay = torch.randn(B, HKV, S, generator=torch.Generator().manual_seed(3)), torch.tensor([-0.1, -0.001])
    dense = prompts if prefill == "dense" else None
    view = LearnedView([lambda *_: (scores, log_decay)], cache, LENGTHS, prompts=dense)
    out = view.attend(0, query, key, value, SCALE)
    mask = papers_mask(scores, log_decay, cache)
    assert (mask.sum(-1) <= cache.budget).all()
    assert (mask.sum(-1) == cache.budget).any()
    if prefill == "dense":
        for row, prompt in enumerate(prompts.tolist()):
            mask[row, :, :prompt] = torch.ones(prompt, S, dtype=torch.bool).tril()
    expected = dense_attention(query, key, value, mask | torch.eye(S, dtype=torch.bool), SCALE)
    real = (torch.arange(S) < LENGTHS[:, None])[:, None, :, None]
    assert ((out - expected) * real).abs().max() <= 1e-5
    causal = dense_attention(query, key, value, torch.ones(B, HKV, S, S, dtype=torch.bool).tril(), SCALE)
    assert ((out - causal) * real).abs().max() > 1e-2  # control: the causal mask gives another output
    decided = view._decided[0].evict_at
    assert view.retained[0][0] < 1
    for row, length in enumerate(LENGTHS.tolist()):  # the entries that the last fed query sees, as in its trace
        seen = float(mask[row, :, length - 2].sum(-1).float().mean()) / (length - 1)
        trace = EvictionTrace.recorded(decided[row, None, :, :length])
        assert float(view.retained[0][row]) == pytest.approx(seen) == pytest.approx(trace.retention())
    assert ((decided == 0) == (torch.arange(S) >= LENGTHS[:, None])[:, None]).all()  # no query sees padding


def test_a_budget_that_is_never_reached_evicts_no_entry() -> None:
    query, key, value = tensors()
    view = LearnedView([lambda *_: (torch.zeros(B, HKV, S), torch.zeros(HKV))], policy(budget=400), LENGTHS)
    out = view.attend(0, query, key, value, SCALE)
    causal = dense_attention(query, key, value, torch.ones(B, HKV, S, S, dtype=torch.bool).tril(), SCALE)
    assert (out - causal).abs().max() <= 1e-5
    assert (view.retained[0] == 1).all()


@pytest.mark.parametrize("chunk", [512, 7])
def test_lse_under_evictions_equals_the_lse_over_visible_keys(chunk: int) -> None:
    """For any chunk size."""
    query, key, _ = tensors()
    scores, log_decay = torch.randn(B, HKV, S), torch.tensor([-0.1, -0.001])
    cache = policy()
    evictions = running_topk(scores, cache.sinks, window=cache.window, k=cache.k, log_decay=log_decay, lengths=LENGTHS)
    ends = LENGTHS[:, None].expand(-1, S)
    result = attention_lse(query, key, scaling=SCALE, ends=ends, evict_at=evictions.evict_at, chunk=chunk)
    logits = query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) * SCALE
    mask = papers_mask(scores, log_decay, cache).repeat_interleave(2, 1)
    expected = logits.masked_fill(~mask, float("-inf")).logsumexp(-1)
    real = (torch.arange(S) < LENGTHS[:, None])[:, None].expand(-1, HQ, -1)
    assert (result - expected)[real].abs().max() <= 1e-5


def test_the_target_is_normalised_by_sparse_or_by_dense_attention() -> None:
    """`dense` over all keys, `sparse` over those not evicted. Here tokens 3 to 8 are evicted at query 15."""
    query, key, _ = tensors()
    ends, evict_at = LENGTHS[:, None].expand(-1, S), torch.full((B, HKV, S), 2**30, dtype=torch.int32)
    evict_at[:, :, 3:9] = 15
    common = {"window": 5, "scaling": SCALE, "ends": ends, "group": "max", "floor": 1e-6}
    given = query, key, SCALE, 5, ends, evict_at
    targets = {name: FutureTarget(TargetConfig(normaliser=name))(*given) for name in ("sparse", "dense")}
    lse = attention_lse(query, key, scaling=SCALE, ends=ends, evict_at=evict_at)
    assert torch.equal(targets["dense"], future_attention_mass(query, key, **common))
    assert torch.equal(targets["sparse"], future_attention_mass(query, key, log_sum_exp=lse, **common))
    assert (targets["sparse"] >= targets["dense"] - 1e-5).all()
    assert (targets["sparse"] - targets["dense"]).max() > 0.1
    assert not targets["sparse"].requires_grad
    assert targets["sparse"].isfinite().all()


def test_the_target_is_computed_in_float32_and_finite_for_any_logits() -> None:
    """Autocast to bfloat16 does not change the target. Evicted keys with huge logits give a large but finite target."""
    query, key, _ = tensors()
    ends, evict_at = LENGTHS[:, None].expand(-1, S), torch.full((B, HKV, S), 2**30, dtype=torch.int32)
    evict_at[:, :, 3:9] = 15
    plain = FutureTarget(TargetConfig())(query, key, SCALE, 5, ends, evict_at)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain, FutureTarget(TargetConfig())(query, key, SCALE, 5, ends, evict_at))
    key[:, :, 3:5] *= 100  # these keys are evicted, and their logits are far above those of all visible keys
    query[:, :, 20:] = key[:, :, 3:4].repeat_interleave(2, 1)
    mass = FutureTarget(TargetConfig())(query, key, SCALE, 5, ends, evict_at)
    assert mass.isfinite().all()
    assert mass.max() > 30


def test_recall_equals_the_counted_common_tokens() -> None:
    """Tokens outside of sinks and window that both selections keep, and that the second keeps, over queries with more
    than k to select. Controls: itself; a long window."""
    generator = torch.Generator().manual_seed(0)
    sinks, window, k = torch.tensor([2, 0]), 5, 7
    first_selection, second_selection = (
        running_topk(torch.randn(B, HKV, S, generator=generator), sinks, window=window, k=k, lengths=LENGTHS)
        for _ in range(2)
    )
    common = total = 0
    for b in range(B):
        first_eligible = int(sinks[b])
        for h in range(HKV):
            for q in range(first_eligible + window + k, int(LENGTHS[b])):
                at, tokens = [s.evict_at[b, h] for s in (first_selection, second_selection)], range(q - window + 1)
                kept = [{t for t in tokens[first_eligible:] if q < int(evict_at[t])} for evict_at in at]
                assert len(kept[0]) == len(kept[1]) == k
                common, total = common + len(kept[0] & kept[1]), total + k
    computed = recall(first_selection, second_selection, sinks, window=window, k=k, lengths=LENGTHS)
    assert [float(x) for x in computed] == [common, total]
    assert 0 < common < total
    same = recall(first_selection, first_selection, sinks, window=window, k=k, lengths=LENGTHS)
    assert float(same[0]) == float(same[1]) == total
    short = recall(first_selection, second_selection, window=60, k=k, lengths=LENGTHS)
    assert [float(x) for x in short] == [0, 0]


@pytest.mark.parametrize("scorer", ["linear", "mlp", "mlstm"])
def test_recomputed_layers_replay_their_decisions(scorer: str) -> None:
    """So checkpointing changes neither loss nor gradients."""
    cache, results = policy(scorer), []
    ids = torch.randint(3, 64, (B, S), generator=torch.Generator().manual_seed(0))
    for checkpointing in (False, True):
        model = adopt(new_model("qwen3", num_hidden_layers=3))
        torch.manual_seed(4)
        attach_scorers(model, KVpop(cache))
        for weight in model.cache_scorers.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        view = LearnedView(
            model.cache_scorers,
            cache,
            LENGTHS,
            target=FutureTarget(TargetConfig()),
            prepare=lambda target, _: target.scores,
            loss=lambda scores, decay, target: (scores - target).square().mean() + decay.sum(),
        )
        out = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
        decided = copy.deepcopy(view._decided)
        assert sorted(view.losses) == [0, 1, 2]
        loss = out.square().mean() + sum(view.losses.values())
        loss.backward()
        assert all(torch.equal(decided[i].evict_at, view._decided[i].evict_at) for i in decided)
        results.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        assert (gradient - results[1][1][name]).abs().max() <= 1e-5 * max(1.0, float(gradient.abs().max())), name
