"""Decoding under a learned policy (KVpop) in the hf engine evicts the same tokens as training, and the cache holds
exactly the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judging import same, shifted, trainer_gap, wrong_traces
from learned import SCORERS, Listening, learned_policy, save_learned, with_scorers, wrong_decisions
from test_cache import Driver, entry_bytes
from tiny import model_of, prompts_of

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.interface import NO_MASK
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.methods.kvpop.config import TargetConfig
from sparse_rl.methods.kvpop.target import FutureTarget, oracle_recall
from sparse_rl.trace import NEVER, batch_traces

BUDGET = 20
LENGTHS = (1, 7, 20, 21, 70)  # prompt lengths: one token, below the budget, the budget, one more, and far longer


def rollouts_of(model: Any, policy: Any, prompts: list[list[int]], tokens: int = 40, **sampling: Any) -> list[Rollout]:
    config = SamplingConfig(max_tokens=tokens, seed=1, ignore_eos=True, **sampling)
    return make_engine("hf", model=model, policy=policy).generate(prompts, config)


@pytest.mark.parametrize("prefill", ["dense", "masked"])
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("family", ["qwen3", "quickstart", "stories260K"])
@pytest.mark.few(2)
def test_decoding_evicts_as_training_does(family: str, scorer: str, prefill: str, tally: Callable) -> None:
    """As the running top-k of training's scores, except for ties in 1 % of the heads. Control: wrong traces."""
    policy = learned_policy(scorer, BUDGET, prefill=prefill)
    model = with_scorers(model_of(family), policy)
    rollouts = rollouts_of(model, policy, prompts_of(family, LENGTHS), 30, n=2)
    wrong_choices, ties, heads = wrong_decisions(model, policy, rollouts)
    assert not wrong_choices
    assert ties <= heads / 100
    true_gap = trainer_gap(model, rollouts)
    tally("kvpop", sum(r.trace.evict_at.numel() for r in rollouts), ties, true_gap)
    assert true_gap <= 1e-5
    for name, with_wrong_trace in wrong_traces(rollouts).items():
        if name == "heads swapped" and scorer == "recency":
            continue
        wrong_gap = trainer_gap(model, with_wrong_trace)
        assert wrong_gap >= max(100 * true_gap, 0.0 if family == "qwen3" else 1e-3), name


@pytest.mark.parametrize("scorer", SCORERS)
def test_every_decoded_query_sees_exactly_the_budget(scorer: str) -> None:
    """Or all tokens, if there are fewer. Cache memory is that of the budget."""
    policy = learned_policy(scorer, BUDGET)
    model = with_scorers(model_of("qwen3"), policy)
    engine = make_engine("hf", model=model, policy=policy)
    rollouts = engine.generate(prompts_of("qwen3", LENGTHS), SamplingConfig(max_tokens=40, seed=0, ignore_eos=True))
    for r in rollouts:
        for query in range(len(r.prompt_ids), len(r.trace) - 1):
            assert (r.trace.kept_counts(query) == min(query + 1, BUDGET)).all()
        assert (r.trace.evict_at < NEVER).any(-1).all()
    assert engine.peak_cache_bytes == len(rollouts) * BUDGET * entry_bytes(model)


def test_state_entries_are_taken_from_the_budget() -> None:
    """The scorers' state takes the memory of 6 entries, so of a budget of 26 the cache holds 20."""
    policy = learned_policy("delayed", BUDGET + 6, state_entries=6)
    model = with_scorers(model_of("qwen3"), policy)
    (r,) = rollouts_of(model, policy, prompts_of("qwen3", [30]))
    assert (r.trace.kept_counts() == BUDGET).all()
    assert not wrong_decisions(model, policy, [r])[0]


@pytest.mark.parametrize("decay_every", [1, 16])
def test_decoding_applies_the_decay_as_training_does(decay_every: int) -> None:
    """A decay of 0.001 per token decides. Control: another step of the decay gives other evictions."""
    policy = learned_policy({"name": "linear", "gamma": 0.9991}, BUDGET, decay_every=decay_every)
    model = with_scorers(model_of("qwen3"), policy, scale=0.003)
    rollouts = rollouts_of(model, policy, prompts_of("qwen3", LENGTHS))
    assert not wrong_decisions(model, policy, rollouts)[0]
    with_other_step = learned_policy({"name": "linear", "gamma": 0.9991}, BUDGET, decay_every=17 - decay_every)
    assert wrong_decisions(model, with_other_step, rollouts)[0]  # control


@pytest.mark.parametrize("scorer", ["linear", "delayed"])
def test_decoding_breaks_ties_as_training_does(scorer: str) -> None:
    """Untrained scorers rank the 8 tokens in one step of the decay equally; no tie is decided otherwise."""
    policy = learned_policy(scorer, BUDGET, decay_every=8)
    model = with_scorers(model_of("qwen3"), policy, scale=0.0)
    wrong_choices, ties, heads = wrong_decisions(
        model, policy, rollouts_of(model, policy, prompts_of("qwen3", LENGTHS))
    )
    assert not wrong_choices
    assert ties == 0 < heads


@pytest.mark.parametrize("scorer", ["mlp", "delayed", "immediate"])
@pytest.mark.few(1)
def test_rows_do_not_depend_on_the_batch(scorer: str) -> None:
    """Three samples, alone and in a batch whose rows end at different times."""
    policy = learned_policy(scorer, BUDGET)
    model, prompts = with_scorers(model_of("qwen3"), policy), prompts_of("qwen3", LENGTHS)
    sampling = SamplingConfig(max_tokens=40, seed=3, n=3)  # rows end at different times
    together = make_engine("hf", model=model, policy=policy).generate(prompts, sampling)
    assert len({len(r.completion_ids) for r in together}) > 2
    for i, prompt in enumerate(prompts):
        alone = make_engine("hf", model=model, policy=policy, max_batch=4).generate([prompt], sampling)
        assert same(alone, together[3 * i : 3 * i + 3])


def test_simulation_equals_sampling() -> None:
    policy = learned_policy("delayed", BUDGET)
    model = with_scorers(model_of("qwen3"), policy)
    rollouts = rollouts_of(model, policy, prompts_of("qwen3", LENGTHS))
    engine = make_engine("hf", model=model, policy=policy)
    again = engine.simulate([r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts])
    assert all(torch.equal(a.trace.evict_at, b.trace.evict_at) for a, b in zip(again, rollouts, strict=True))


@pytest.mark.parametrize("scorer", ["mlp", "delayed"])
def test_the_cache_holds_the_recorded_entries_and_frozen_rows_are_kept(scorer: str) -> None:
    """After every step. Row 2 is frozen from step 20 on."""
    policy = learned_policy(scorer, BUDGET)
    model = with_scorers(model_of("qwen3"), policy)
    driver = Driver(model, policy.bound_to(model), prompts_of("qwen3", [33, 18, 2, 21]))
    cache, frozen = driver.cache, [True, True, False, True]
    kept: list[torch.Tensor] = []
    for step in range(30):
        if step == 20:
            kept = [
                t[2, :, : cache.lengths[2]].clone() for layer in cache.layers.values() for t in layer.slotted().values()
            ]
        active = [True] * 4 if step < 20 else frozen
        driver.decode([(7 * step + row) % 60 + 3 for row in range(4)], active)
        for row, seen in enumerate(cache.seen):
            if not active[row]:
                continue
            record = cache.evict_at(row, seen)
            for index, layer in cache.layers.items():
                for head, positions in enumerate(layer.positions[row, :, : cache.lengths[row]]):
                    assert sorted(positions.tolist()) == (record[index, head] >= seen).nonzero()[:, 0].tolist()
    after = [t[2, :, : cache.lengths[2]] for layer in cache.layers.values() for t in layer.slotted().values()]
    names = [name for layer in cache.layers.values() for name in layer.slotted()]
    assert all(torch.equal(a, b) for n, a, b in zip(names, kept, after, strict=True) if n != "priority")
    assert [cache.evict_at(2, 22).min() < NEVER]


def test_a_saved_model_directory_is_sampled_with_its_own_policy(tmp_path: Any) -> None:
    """And its scorers, as the model in memory; no random number is drawn. With `policy="full"` nothing is evicted."""
    policy = learned_policy("delayed", BUDGET, prefill="masked")
    model, prompts = with_scorers(model_of("qwen3"), policy), prompts_of("qwen3", LENGTHS)
    save_learned(model, policy, tmp_path)
    random = torch.random.get_rng_state()
    engine = make_engine("hf", model=tmp_path)
    assert torch.equal(random, torch.random.get_rng_state())
    assert engine.policy.config == policy.config
    sampling = SamplingConfig(max_tokens=40, seed=1, ignore_eos=True)
    assert same(engine.generate(prompts, sampling), rollouts_of(model, policy, prompts))
    full = make_engine("hf", model=tmp_path, policy="full").generate(prompts, sampling)
    assert not any((r.trace.evict_at < NEVER).any() for r in full)


@pytest.mark.parametrize("scorer", ["mlp", "recency"])
def test_oracle_recall_equals_counting_query_by_query(scorer: str) -> None:
    """The share of the tokens with the most future attention that the cache keeps. Control: a full cache has 1."""
    policy = learned_policy(scorer, BUDGET)
    model = with_scorers(model_of("quickstart"), policy)
    (r,) = rollouts_of(model, policy, prompts_of("quickstart", [30]), 30)
    tokens, config = [*r.prompt_ids, *r.completion_ids], policy.config
    decay = torch.stack([layer_scorers.log_decay() for layer_scorers in model.cache_scorers])
    result = oracle_recall(model, tokens, 30, r.trace, config, decay)
    assert result.shape == r.trace.shape[:2]
    assert ((result > 0) & (result < 1)).all()
    assert (oracle_recall(model, tokens, 30, r.trace.dense_like(), config, decay) == 1).all()

    fed, heard = len(tokens) - 1, Listening(batch_traces([r.trace.dense_like()], [0], len(tokens)), "cpu")
    heard.heard = {}
    model(input_ids=torch.tensor([tokens[:fed]]), attention_mask=NO_MASK, kv_view=heard, use_cache=False)
    never = torch.full((1, r.trace.kv_heads, fed), NEVER, dtype=torch.int32)
    for layer, (query, key, _) in heard.heard.items():
        target, ends = FutureTarget(TargetConfig(normaliser="dense")), torch.full((1, fed), fed)
        expected = target(query, key, key.shape[-1] ** -0.5, config.window, ends, never)[0]
        for head in range(r.trace.kv_heads):
            priority = expected[head] - decay[layer, head] * torch.arange(fed)
            common = total = 0
            for q in range(30, fed):
                competing = list(range(config.sinks, q - config.window + 1))
                best = sorted(competing, key=lambda t: (-float(priority[t]), t))[: config.k]
                common += sum(int(r.trace.evict_at[layer, head, t]) > q for t in best)
                total += config.k
            assert float(result[layer, head]) == pytest.approx(common / total, abs=1e-9)


def test_load_weights_replaces_the_scorers_too() -> None:
    policy = learned_policy("mlp", BUDGET)
    first, second = (with_scorers(model_of("qwen3"), policy, seed) for seed in (0, 1))
    prompts = prompts_of("qwen3", LENGTHS)
    before, expected = rollouts_of(first, policy, prompts), rollouts_of(second, policy, prompts)
    assert not same(before, expected)
    engine = make_engine("hf", model=first, policy=policy)
    engine.load_weights(second.named_parameters())
    assert same(rollouts_of(first, policy, prompts), expected)


def test_mismatched_scorers_are_refused() -> None:
    policy = learned_policy("mlp", BUDGET)
    with pytest.raises(UserError, match="the model has no scorers"):
        make_engine("hf", model=model_of("qwen3"), policy=policy)
    model = with_scorers(model_of("qwen3"), policy)
    with pytest.raises(UserError, match=r"the scorers of the model are .*'mlp'.* asks for .*'linear'"):
        make_engine("hf", model=model, policy=learned_policy("linear", BUDGET))
    model.cache_scorers[1].bias.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="kvpop: a NaN score in layer 1"):
        rollouts_of(model, policy, prompts_of("qwen3", [9]))


def test_control_a_missing_last_eviction_gives_a_large_gap() -> None:
    """A learned policy evicts once more before the last token is sampled."""
    policy = learned_policy("mlp", BUDGET)
    model = with_scorers(model_of("quickstart"), policy)
    rollouts = rollouts_of(model, policy, prompts_of("quickstart", [40, 50]))
    for r in rollouts:
        last = r.trace.evict_at == len(r.trace) - 2
        assert last.any(-1).all()
        r.trace.evict_at[last] = NEVER
    assert trainer_gap(model, rollouts) >= 1e-3
    assert shifted(rollouts[0].trace.evict_at, 0).dtype == torch.int32
