"""The vLLM engine continues from compacted contexts as the hf engine does, and uses blocks only for the kept
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from continued import slow_logprobs
from judging import gap, same
from watching import pool_of, watched

from rollout import Rollout, SamplingConfig, make_engine
from rollout.context import Context, PromptCacheConfig
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.errors import UserError
from sparse_rl.models.identity import Identity, identify
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


@pytest.fixture
def compacted(loaded: Callable, directory_of: Callable, random_prompts: Callable) -> Callable[..., Context]:
    """compacted(model="qwen2", counts=None, **settings) -> a context of 100 tokens, compacted by the hf engine."""

    def make(model: str | Path = "qwen2", counts: Sequence[Sequence[int]] | None = None, **settings: Any) -> Context:
        engine = make_engine("hf", model=loaded(model if isinstance(model, Path) else directory_of(model)))
        (tokens,) = random_prompts([100], seed=5)
        return engine.compact(tokens, PromptCacheConfig(first=2, last=3, **settings), counts=counts)

    return make


@pytest.fixture
def wanted_of(loaded: Callable, directory_of: Callable) -> Callable[..., list[Rollout]]:
    """wanted_of(questions, sampling, context, model="qwen2") -> the rollouts that the hf engine samples."""

    def make(questions: list[list[int]], sampling: SamplingConfig, context: Context, model: Any = "qwen2") -> Any:
        folder = model if isinstance(model, Path) else directory_of(model)
        return make_engine("hf", model=loaded(folder)).generate(questions, sampling, context)

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(1)
def test_continuations_equal_those_of_hf(
    family: str, compacted: Callable, wanted_of: Callable, open_engine: Callable, random_prompts: Callable,
    loaded: Callable, directory_of: Callable,
) -> None:  # fmt: skip
    """Continuations of several contexts in turn equal those of hf, and those of the slow reference that attends to one
    entry at a time.
    """
    engine, questions = open_engine("full", family, context_entries=200), random_prompts(LENGTHS)
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
    family: str, compacted: Callable, open_engine: Callable, random_prompts: Callable,
    loaded: Callable, directory_of: Callable,
) -> None:  # fmt: skip
    """Control: without the record of the fits, the replay has a gap of more than 1e-3."""
    engine, model = open_engine("full", family, context_entries=200), loaded(directory_of(family))
    context = compacted(family, ratio=0.2, queries=["context"], chunk=40)
    rollouts = engine.generate(random_prompts(LENGTHS), SAMPLING, context)
    plain = [replace(r, trace=EvictionTrace(r.trace.evict_at)) for r in rollouts]
    with torch.no_grad():
        assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5
        assert gap(replay_logprobs(model, plain), rollouts) > 1e-3


def test_heads_and_layers_may_keep_different_numbers_of_entries(
    compacted: Callable, wanted_of: Callable, open_engine: Callable, random_prompts: Callable
) -> None:
    engine, questions = open_engine("full", context_entries=200), random_prompts(LENGTHS)
    context = compacted(counts=[[1 + 30 * layer, 5 + 3 * layer] for layer in range(2)])
    assert len({layer.keys.shape[2] for layer in context.layers}) == 2
    assert same(wanted_of(questions, SAMPLING, context), engine.generate(questions, SAMPLING, context))


def test_questions_may_be_prefilled_in_chunks(
    compacted: Callable, wanted_of: Callable, open_engine: Callable, random_prompts: Callable
) -> None:
    engine = open_engine("full", context_entries=400, max_num_batched_tokens=40)
    questions, context = random_prompts((150, 90, 3, 201)), compacted(ratio=0.3)
    assert same(wanted_of(questions, SAMPLING, context), engine.generate(questions, SAMPLING, context))


def test_completions_share_the_blocks_that_a_context_fills(
    compacted: Callable, open_engine: Callable, random_prompts: Callable
) -> None:
    """A context has 72 entries. The first 64 fill two blocks of 32, which 8 completions share. The other 8 entries lie
    in a third block; each completion needs a copy of it, and a fourth block.
    """
    engine, context = open_engine("full", context_entries=200), compacted(counts=[[67, 67]] * 2)
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


def test_a_pool_with_room_only_for_the_kept_entries_is_enough(
    compacted: Callable, wanted_of: Callable, open_engine: Callable, random_prompts: Callable
) -> None:
    """A pool of five blocks is enough for the kept entries and the sequences. The context before its compaction would
    take four blocks, and leave too few for a sequence.
    """
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
    apart: dict, compacted: Callable, open_engine: Callable, random_prompts: Callable, loaded: Callable,
    directory_of: Callable, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Continuations equal the slow reference under vLLM's own kernel, where a coordinate of the keys holds the biases,
    and with workers in separate processes, which read the context from a file.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine, questions = open_engine("full", context_entries=200, **apart), random_prompts((1, 9, 40))
    for context in (compacted(ratio=0.3), compacted(counts=[[1, 40], [20, 3]])):
        rollouts = engine.generate(questions, SamplingConfig(12, seed=2, ignore_eos=True), context)
        for question, rollout in zip(questions, rollouts, strict=True):
            slow = slow_logprobs(loaded(directory_of("qwen2")), context, question, rollout.completion_ids)
            assert gap([slow], [rollout]) <= 1e-5


def test_both_engines_and_a_module_have_one_fingerprint(
    compacted: Callable, open_engine: Callable, loaded: Callable, directory_of: Callable, random_prompts: Callable
) -> None:
    """The context names its model. After new weights, vLLM's model is unknown and not compared."""
    context, (question,) = compacted(ratio=0.3), random_prompts([5])
    engine, model = open_engine("full", context_entries=60), loaded(directory_of("qwen2"))
    assert engine.identity.fingerprint == identify(model).fingerprint == context.model.fingerprint != ""
    engine.load_weights(model.state_dict().items())
    assert engine.identity.fingerprint == ""
    engine.generate([question], SAMPLING, context)


def test_unsupported_contexts_are_refused(
    compacted: Callable, open_engine: Callable, random_prompts: Callable, policy_of: Callable
) -> None:
    context, (question,) = compacted(ratio=0.3), random_prompts([5])
    engine = open_engine("full", context_entries=60)
    with pytest.raises(UserError, match="prompt 0 may need 62 entries; raise context_entries, which is 60"):
        engine.generate([question], SamplingConfig(24), context)
    with pytest.raises(UserError, match="the context is of another model"):
        engine.generate([question], SAMPLING, replace(context, layers=context.layers[:1]))
    with pytest.raises(
        UserError, match=r"the context is of another model: it was made with .* \(12\), and is used with"
    ):
        engine.generate([question], SAMPLING, replace(context, model=Identity("other", "12")))
    with pytest.raises(UserError, match="prompt 0 has 105 tokens: with max_tokens 1000"):
        engine.generate([question], SamplingConfig(1000), context)
    engine = open_engine("full")
    with pytest.raises(UserError, match="this engine cannot continue a context; pass context_entries to make_engine"):
        engine.generate([question], SAMPLING, context)
    with pytest.raises(UserError, match="a compacted context cannot be combined with the evicting policy tova"):
        open_engine(policy_of("tova", budget=20), context_entries=60)
