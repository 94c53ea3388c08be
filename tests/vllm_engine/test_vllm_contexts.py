"""The vLLM engine continues from compacted contexts as hf does, with blocks only for the kept entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from continued import slow_logprobs
from judging import gap, same, trainer_gap
from tiny import directory_of, loaded, policy_of, random_prompts
from watching import pool_of, watched

from rollout import Rollout, SamplingConfig, make_engine
from rollout.context import Context, PromptCacheConfig
from sparse_rl.errors import UserError
from sparse_rl.models.weights import Identity, identify
from sparse_rl.trace import EvictionTrace

SAMPLING = SamplingConfig(max_tokens=20, seed=1, n=2, ignore_eos=True)
LENGTHS = (1, 7, 33, 4, 12, 7)
FAMILIES = ["qwen2", "qwen3", "llama"]
SETTINGS: dict[str, dict[str, Any]] = {
    "attention": {"ratio": 0.3},
    "omp": {"ratio": 0.6, "select": "omp"},
    "evict": {"ratio": 0.4, "policy": "evict"},
    "less than a block": {"ratio": 0.05},
    "everything": {"ratio": 1.0, "policy": "evict"},
    "whole blocks": {"ratio": 59 / 95},
}


def compacted(model: str = "qwen2", counts: Sequence[Sequence[int]] | None = None, **settings: Any) -> Context:
    """Return a context of 100 tokens, compacted by the hf engine."""
    (tokens,) = random_prompts([100], seed=5)
    engine = make_engine("hf", model=loaded(directory_of(model)))
    config = PromptCacheConfig(first=2, last=3, **settings)
    return engine.study(tokens, config).compacted(config, counts)


def wanted_of(questions: list[list[int]], sampling: Any, context: Context, model: str = "qwen2") -> list[Rollout]:
    """Return the rollouts that the hf engine samples."""
    return make_engine("hf", model=loaded(directory_of(model))).generate(questions, sampling, context)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(1)
def test_continuations_equal_those_of_hf(family: str, open_engine: Callable) -> None:
    """And those of the slow reference, which attends to one entry at a time; for several contexts in turn."""
    engine, questions = open_engine("full", family, True, context_entries=200), random_prompts(LENGTHS)
    for label, settings in SETTINGS.items():
        context = compacted(family, **settings)
        rollouts = engine.generate(questions, SAMPLING, context)
        assert same(wanted_of(questions, SAMPLING, context, family), rollouts), label
        for question, rollout in zip(questions, rollouts[::2], strict=True):
            slow = slow_logprobs(loaded(directory_of(family)), context, question, rollout.completion_ids)
            assert gap([slow], [rollout]) <= 1e-5, label
    (simulated,) = engine.simulate(questions[1:2], [rollouts[2].completion_ids], context=context)
    assert gap([torch.tensor(rollouts[2].model_logprobs)], [simulated]) <= 1e-5
    without_context = make_engine("hf", model=loaded(directory_of(family))).generate(questions, SAMPLING)
    assert same(without_context, engine.generate(questions, SAMPLING))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_trainer_replays_continuations_of_a_context_fitted_to_its_own_queries(
    family: str, open_engine: Callable
) -> None:
    """Control: without the record of the fits, the replay has a gap of more than 1e-3."""
    engine, model = open_engine("full", family, True, context_entries=200), loaded(directory_of(family))
    context = compacted(family, ratio=0.2, queries=["context"], chunk=40)
    rollouts = engine.generate(random_prompts(LENGTHS), SAMPLING, context)
    plain = [replace(r, trace=EvictionTrace(r.trace.evict_at)) for r in rollouts]
    assert trainer_gap(model, rollouts) <= 1e-5
    assert trainer_gap(model, plain) > 1e-3


def test_heads_and_layers_may_keep_different_numbers_of_entries(open_engine: Callable) -> None:
    engine, questions = open_engine("full", shared=True, context_entries=200), random_prompts(LENGTHS)
    context = compacted(counts=[[1 + 30 * layer, 5 + 3 * layer] for layer in range(2)])
    assert len({layer.keys.shape[2] for layer in context.layers}) == 2
    assert same(wanted_of(questions, SAMPLING, context), engine.generate(questions, SAMPLING, context))


def test_questions_may_be_prefilled_in_chunks(open_engine: Callable) -> None:
    engine = open_engine("full", context_entries=400, max_num_batched_tokens=40)
    questions, context = random_prompts((150, 90, 3, 201)), compacted(ratio=0.3)
    assert same(wanted_of(questions, SAMPLING, context), engine.generate(questions, SAMPLING, context))


def test_completions_share_the_blocks_that_a_context_fills(open_engine: Callable) -> None:
    """64 of 72 entries fill two blocks, which 8 completions share; each copies the third block and needs a fourth."""
    engine, context = open_engine("full", shared=True, context_entries=200), compacted(counts=[[67, 67]] * 2)
    free = pool_of(engine).get_num_free_blocks()
    sampling = SamplingConfig(max_tokens=40, seed=1, n=8, ignore_eos=True)
    with watched(engine) as records:
        first = engine.generate(random_prompts([3]), sampling, context)
    assert context.entries == 72
    assert max(records.running) == 8
    assert max(records.used) == 2 + 8 * 2
    assert pool_of(engine).get_num_free_blocks() == free
    assert same(first, engine.generate(random_prompts([3]), sampling, context))
    with watched(engine) as records:
        engine.generate([[*context.tokens, *random_prompts([3])[0]]], sampling)
    assert max(records.used) == 8 * 5  # without compaction: 100 + 3 + 39 tokens for each completion


def test_a_pool_with_room_only_for_the_kept_entries_is_enough(open_engine: Callable) -> None:
    """Five blocks. The context before its compaction would take four, and leave too few for a sequence."""
    # five blocks and the null block: keys and values, block size, Hkv, D, bytes of float32, layers
    five_blocks = (5 + 1) * 2 * 32 * 2 * 32 * 4 * 2 / 2**30
    engine = open_engine("full", context_entries=96, kv_cache_gb=five_blocks)
    assert pool_of(engine).get_num_free_blocks() == 5
    questions, context = random_prompts((10, 20, 5, 8)), compacted(ratio=0.3)
    with watched(engine) as records:
        rollouts = engine.generate(questions, SamplingConfig(40, seed=3, ignore_eos=True), context)
    assert same(wanted_of(questions, SamplingConfig(40, seed=3, ignore_eos=True), context), rollouts)
    assert max(records.used) <= 5
    assert pool_of(engine).get_num_free_blocks() == 5


APART = [
    {"exact": False},
    *(pytest.param(o, marks=pytest.mark.slow) for o in ({"multiprocess": True}, {"tensor_parallel": 2})),
]


@pytest.mark.parametrize("apart", APART, ids=str)
def test_other_kernels_and_processes_give_the_same_continuations(
    apart: dict, open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own kernel, with biases in a coordinate of the keys; and other processes, which read a file."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine, questions = open_engine("full", context_entries=200, **apart), random_prompts((1, 9, 40))
    for context in (compacted(ratio=0.3), compacted(counts=[[1, 40], [20, 3]])):
        rollouts = engine.generate(questions, SamplingConfig(12, seed=2, ignore_eos=True), context)
        for question, rollout in zip(questions, rollouts, strict=True):
            slow = slow_logprobs(loaded(directory_of("qwen2")), context, question, rollout.completion_ids)
            assert gap([slow], [rollout]) <= 1e-5


def test_both_engines_and_a_module_have_one_fingerprint(open_engine: Callable) -> None:
    """The context names its model. After new weights, vLLM's model is unknown and not compared."""
    context, (question,) = compacted(ratio=0.3), random_prompts([5])
    engine, model = open_engine("full", context_entries=60), loaded(directory_of("qwen2"))
    assert engine.identity.fingerprint == identify(model).fingerprint == context.model.fingerprint != ""
    engine.load_weights(model.state_dict().items())
    assert engine.identity.fingerprint == ""
    engine.generate([question], SAMPLING, context)


def test_unsupported_contexts_are_refused(open_engine: Callable) -> None:
    context, (question,) = compacted(ratio=0.3), random_prompts([5])
    engine, another = open_engine("full", context_entries=60), "the context is of another model"
    for sampling, of, message in (
        (SamplingConfig(24), context, "prompt 0 may need 62 entries; raise context_entries, which is 60"),
        (SAMPLING, replace(context, layers=context.layers[:1]), another),
        (SAMPLING, replace(context, model=Identity("other", "12")), rf"{another}: .* made with .* \(12\), and is used"),
        (SamplingConfig(1000), context, "prompt 0 has 105 tokens: with max_tokens 1000"),
    ):
        with pytest.raises(UserError, match=message):
            engine.generate([question], sampling, of)
    engine = open_engine("full")
    with pytest.raises(UserError, match="this engine cannot continue a context; pass context_entries to make_engine"):
        engine.generate([question], SAMPLING, context)
    with pytest.raises(UserError, match="a compacted context cannot be combined with the evicting policy tova"):
        open_engine(policy_of("tova", budget=20), context_entries=60)
