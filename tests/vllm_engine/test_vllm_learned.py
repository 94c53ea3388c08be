"""Under a learned policy, vLLM evicts as training and hf do, before a query attends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from judging import same, trainer_gap, wrong_traces
from learned import SCORERS, learned_policy, save_learned, with_scorers, wrong_decisions
from tiny import FOLDER, HEADS_OF_32, directory_of, new_model, random_prompts
from watching import pool_of, watched

from rollout import SamplingConfig, make_engine
from rollout.vllm.memory import beside_cache
from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.scorers import head_digests
from sparse_rl.models.load import load_model

B = 20
LENGTHS = (1, 7, 20, 21, 22, 65, 80, 150)  # with 65 and 81, the last chunk has one token, for chunks of 16


@cache
def learned(scorer: str, seed: int = 0) -> Path:
    """Return the directory of a model whose scorers differ from their start."""
    policy, folder = learned_policy(scorer, B), Path(mkdtemp(dir=FOLDER.name))
    save_learned(with_scorers(new_model("qwen3", **HEADS_OF_32), policy, seed, scale=0.2), policy, folder)
    return folder


@pytest.mark.parametrize("chunk", [2048, 16])
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.few(2)
def test_evictions_equal_those_of_training_and_hf(scorer: str, chunk: int, open_engine: Callable) -> None:
    """Except for ties in at most 1 % of the heads. Prompts come whole or in chunks, and some sequences wait."""
    folder, prompts = learned(scorer), random_prompts(LENGTHS)
    model, policy = load_model(folder), learned_policy(scorer, B)
    engine = open_engine(None, folder, max_batch=10, max_num_batched_tokens=chunk)
    assert engine.policy.config == policy.config
    for n, temperature in ((3, 1.0), (1, 0.0)):
        sampling = SamplingConfig(max_tokens=30, seed=2, n=n, temperature=temperature, ignore_eos=True)
        rollouts = engine.generate(prompts, sampling)
        wrong_evictions, ties, heads = wrong_decisions(model, policy, rollouts)
        assert not wrong_evictions
        assert ties <= heads / 100
        largest_gap = trainer_gap(model, rollouts, temperature or 1.0)
        assert largest_gap <= 1e-5
        for name, others in wrong_traces(rollouts).items():
            if name != "heads swapped" or scorer != "recency":
                assert trainer_gap(model, others, temperature or 1.0) >= 100 * largest_gap, name
        reference = make_engine("hf", model=model, policy=policy).generate(prompts, sampling)
        assert same(rollouts, reference)
        for r in rollouts:
            for query in range(len(r.prompt_ids), len(r.trace) - 1):
                assert (r.trace.kept_counts(query) == min(query + 1, B)).all()


@pytest.mark.parametrize("scorer", ["delayed", "linear"])
@pytest.mark.few(1)
def test_vllm_breaks_ties_as_training_does(scorer: str, open_engine: Callable, tmp_path: Path) -> None:
    """Untrained scorers give all tokens within one step of the decay equal scores; no tie is decided otherwise."""
    policy = learned_policy(scorer, B, decay_every=8)
    save_learned(with_scorers(new_model("qwen3", **HEADS_OF_32), policy, scale=0.0), policy, tmp_path)
    rollouts = open_engine(None, tmp_path).generate(
        random_prompts(LENGTHS), SamplingConfig(30, seed=2, ignore_eos=True)
    )
    wrong_evictions, ties, heads = wrong_decisions(load_model(tmp_path), policy, rollouts)
    assert not wrong_evictions
    assert ties == 0 < heads


@pytest.mark.parametrize("scorer", ["mlp", "delayed"])
@pytest.mark.few(1)
def test_no_request_is_preempted_if_its_budget_has_blocks(scorer: str, open_engine: Callable) -> None:
    """The pool has ceil(max(P, B) / block size) blocks for a prompt of P, and ceil(B / block size) afterwards."""
    folder, prompts = learned(scorer), random_prompts([5, 40, 41, 70, 130])
    size, needed = 32, [2, 2, 2, 3, 5]
    block_bytes = 2 * 2 * size * 2 * 32 * 4  # layers, keys and values, tokens, kv heads, dim, float32
    blocks = sum(needed)
    policy, memory = learned_policy(scorer, 40), (blocks + 1) * block_bytes / 2**30
    engine = open_engine(policy, folder, max_batch=5, max_prompt=130, block_size=size, kv_cache_gb=memory)
    assert pool_of(engine).get_num_free_blocks() == blocks
    with watched(engine) as records:
        rollouts = engine.generate(prompts, SamplingConfig(max_tokens=120, seed=0, ignore_eos=True))
    assert records.preempted == 0
    assert max(records.running) == 5
    assert records.used[0] == 1 + 2 + 2 + 3 + 5 == max(records.used)  # 40 entries need 2 blocks
    assert records.used[-1] == 5 * 2
    assert not wrong_decisions(load_model(folder), engine.policy, rollouts)[0]
    assert pool_of(engine).get_num_free_blocks() == blocks


@pytest.mark.parametrize("scorer", ["mlp", "delayed"])
@pytest.mark.few(1)
def test_scorers_are_updated_with_the_weights(scorer: str, open_engine: Callable) -> None:
    """The engine then samples as the other model does, and has the digests of its scorers."""
    folder, other = learned(scorer), load_model(learned(scorer, seed=1))
    prompts, sampling = random_prompts(LENGTHS), SamplingConfig(max_tokens=30, seed=2, ignore_eos=True)
    engine, policy = open_engine(None, folder), learned_policy(scorer, B)
    before = engine.generate(prompts, sampling)
    scorers = dict(other.cache_scorers.named_parameters())
    assert engine.scorer_digests() != head_digests(scorers)
    engine.load_weights(other.named_parameters())
    assert engine.scorer_digests() == head_digests(scorers)
    after = engine.generate(prompts, sampling)
    assert same(after, make_engine("hf", model=other, policy=policy).generate(prompts, sampling))
    assert not same(after, before)
    assert not wrong_decisions(other, policy, after)[0]
    with torch.no_grad():
        next(iter(scorers.values())).view(-1)[0].add_(1e-6)
    assert engine.scorer_digests() != head_digests(scorers)
    incomplete = [(name, weight) for name, weight in other.named_parameters() if "scorers.1" not in name]
    with pytest.raises(UserError, match=r"were not handed over: cache_scorers\.1"):
        engine.load_weights(incomplete)


@pytest.mark.slow
def test_vllm_ignores_scorers_under_a_policy_without_scorers(open_engine: Callable) -> None:
    folder, prompts = learned("delayed"), random_prompts([9, 50])
    sampling = SamplingConfig(max_tokens=30, seed=2, ignore_eos=True)
    for policy in ("full", {"policy": "streaming", "budget": 16}):
        rollouts = open_engine(policy, folder).generate(prompts, sampling)
        assert same(rollouts, make_engine("hf", model=folder, policy=policy).generate(prompts, sampling))


def test_memory_outside_the_cache_is_counted(open_engine: Callable) -> None:
    """`beside_cache` counts the bytes of the scorers' memory that the worker allocates for each request."""
    from rollout.vllm.compat.paged import live_state

    engine = open_engine(None, learned("delayed"), max_batch=5)
    counted, state = beside_cache(engine.policy, engine.config, itemsize=4, max_batch=5), live_state()
    assert counted.requests == sum(memory.nbytes for memory in state.memory.values()) > 0
    assert counted.per_byte == 8 / (2 * 32 * 4)


def test_unsupported_learned_policies_are_refused(open_engine: Callable) -> None:
    same_number = "dms: vllm holds the same number of entries in every kv head; or use the hf engine"
    for policy, folder, message in (
        (learned_policy("mlp", B, prefill="masked"), learned("mlp"), "vllm does not mask prompts"),
        ({"policy": "dms", "scorer": "mlp"}, learned("mlp"), same_number),
        (learned_policy("mlp", B), directory_of("qwen3"), "has no scorers, which kvpop needs"),
        (learned_policy("linear", B), learned("mlp"), r"the scorers of .* are .*'mlp'.* asks for .*'linear'"),
    ):
        with pytest.raises(UserError, match=message):
            open_engine(policy, folder)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"multiprocess": True}, {"tensor_parallel": 2}], ids=str)
@pytest.mark.parametrize("scorer", ["mlp", "delayed", "immediate"])
def test_an_engine_in_another_process_gives_the_same_results(
    scorer: str, options: dict, open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with its heads split over two processes, and after an update of the weights."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder, prompts = learned(scorer), random_prompts(LENGTHS)
    engine, policy = open_engine(None, folder, max_batch=6, **options), learned_policy(scorer, B)
    sampling = SamplingConfig(max_tokens=30, seed=2, ignore_eos=True)
    for model in (load_model(folder), load_model(learned(scorer, seed=1))):
        engine.load_weights(model.named_parameters())
        assert engine.scorer_digests() == head_digests(dict(model.cache_scorers.named_parameters()))
        rollouts = engine.generate(prompts, sampling)
        wrong_evictions, ties, heads = wrong_decisions(model, policy, rollouts)
        assert not wrong_evictions
        assert ties <= heads / 100
        assert trainer_gap(model, rollouts) <= 1e-5
        if not options.get("tensor_parallel"):
            assert same(rollouts, make_engine("hf", model=model, policy=policy).generate(prompts, sampling))
