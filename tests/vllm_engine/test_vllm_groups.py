"""vLLM prefills the prompt of a group once: the samples begin with copies of its entries (rollout/vllm/connector.py),
and all is as with a prefill for each sample, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from judging import outcome, trainer_gap
from learned import SCORERS
from policy_cases import ON_VLLM
from test_vllm_learned import learned
from test_vllm_memory import with_blocks
from test_vllm_preemption import preempting
from tiny import QUICKSTART, directory_of, policy_of, random_prompts
from watching import pool_of, scheduler_of, watched

from rollout import Rollout, SamplingConfig
from rollout.vllm.engine import VLLMEngine
from rollout.vllm.scheduler import HOLDING, EvictingManager
from sparse_rl.models.load import load_model
from sparse_rl.trace import NEVER

LENGTHS = (90, 40, 1, 33, 64, 2, 65)  # 33 and 65: all tokens but the last fill blocks of 32
SAMPLING = SamplingConfig(40, n=4, seed=3, ignore_eos=True)
GKV = policy_of("gkv", budget=32, window=8, period=8)
CASES = [
    ("gkv", "qwen2"),
    *((name, "qwen2") for name in ON_VLLM if name not in ("full", "gkv")),
    *((scorer, "learned") for scorer in SCORERS),
    ("gkv", "qwen3_moe"),
]
APART = [{"multiprocess": True}, {"tensor_parallel": 2}]


def apart(engine: Any, prompts: list[list[int]], sampling: SamplingConfig = SAMPLING) -> list[Rollout]:
    """Sample with a prefill for each sample."""
    with mock.patch.object(VLLMEngine, "_groups", lambda self, requests: [[request] for request in requests]):
        return engine.generate(prompts, sampling)


def fed(records: Any, rollouts: Iterable[Rollout]) -> int:
    """Return the number of tokens of prompts that were fed; of a completion, all but the last are fed."""
    return sum(records.fed) - sum(len(r.completion_ids) - 1 for r in rollouts)


def nothing_is_left(engine: Any) -> bool:
    """Return True if no request has blocks, and at most requests that ended in the last step have rows."""
    from rollout.vllm.compat.paged import live_state

    connector, pool, state = scheduler_of(engine).connector, pool_of(engine), live_state()
    (manager,) = scheduler_of(engine).kv_cache_manager.coordinator.single_type_managers
    kept = HOLDING, connector.groups, connector.running, manager.claims, manager.firsts, manager.req_to_blocks
    rows = sorted([*state.free_rows, *(state.row_of[block] for block in connector.step.ended)])
    return (
        pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        and not any(kept)
        and rows == list(range(len(state.failed) - 1))
    )


@pytest.mark.parametrize("chunk", [2048, 48])
@pytest.mark.parametrize(("name", "family"), CASES)
@pytest.mark.few(2)
def test_samples_of_one_prefill_equal_those_of_separate_prefills(
    name: str, family: str, chunk: int, open_engine: Callable
) -> None:
    """Tokens, log-probs and all sections, supports among them, also if prompts come in chunks. P - 1 + n tokens are fed
    instead of n P. Control: for a single sample, P are."""
    is_learned = family == "learned"
    policy = None if is_learned else policy_of(name, budget=32, window=8, period=8)
    folder = learned(name) if is_learned else directory_of(family)
    engine = open_engine(policy, folder, max_batch=12, max_num_batched_tokens=chunk, max_model_len=256)
    prompts, sampling = random_prompts(LENGTHS), replace(SAMPLING, top_p=0.9, record_support=True)
    with watched(engine) as records:
        expected = apart(engine, prompts, sampling)
    with watched(engine) as records_of_groups:
        rollouts = engine.generate(prompts, sampling)
    assert outcome(rollouts) == outcome(expected)
    assert records_of_groups.preempted == 0
    assert nothing_is_left(engine)
    assert any(bool((r.trace.evict_at < NEVER).any()) for r in rollouts)
    assert all(len(r.trace.sections) > 1 for r in rollouts)
    assert fed(records, expected) == SAMPLING.n * sum(LENGTHS)
    assert fed(records_of_groups, rollouts) == sum(length - 1 + SAMPLING.n for length in LENGTHS)
    with watched(engine) as records:
        one_of_each = engine.generate(prompts, replace(sampling, n=1))
    assert fed(records, one_of_each) == sum(LENGTHS)
    assert outcome(one_of_each) == outcome(rollouts[:: SAMPLING.n])


@pytest.mark.parametrize("policy_name", ["gkv", "am"])
@pytest.mark.few(1)
def test_in_vllms_own_kernels_the_samples_of_one_prefill_are_as_exact(policy_name: str, open_engine: Callable) -> None:
    """There the last bits depend on the batch. Under am, a coordinate of the copied keys holds the biases."""
    policy = policy_of(policy_name, budget=24, sinks=1, window=8, period=16, reference_queries=24)
    engine = open_engine(policy, QUICKSTART, exact=False, max_model_len=256)
    model, prompts = load_model(QUICKSTART), [[1, *prompt] for prompt in random_prompts(LENGTHS)]
    largest_gap = trainer_gap(model, engine.generate(prompts, SAMPLING))
    assert largest_gap <= max(2 * trainer_gap(model, apart(engine, prompts)), 1e-5)


def test_equal_prompts_are_one_group_wherever_they_stand(open_engine: Callable) -> None:
    """Also if completions are simulated; a completion may end with its first token."""
    engine, (a, b) = open_engine(GKV, shared=True, max_model_len=256), random_prompts((60, 80))
    prompts, completions = [a, b, a, a, b], [[5], [6, 7, 8] * 10, [9] * 20, [5, 6], [7]]
    with mock.patch.object(VLLMEngine, "_groups", lambda self, requests: [[request] for request in requests]):
        expected = engine.simulate(prompts, completions)
    with watched(engine) as records:
        rollouts = engine.simulate(prompts, completions)
    assert outcome(rollouts) == outcome(expected)
    assert fed(records, rollouts) == 60 - 1 + 3 + 80 - 1 + 2
    assert nothing_is_left(engine)


@pytest.mark.parametrize("blocks", [15, 18, 21, 25])
@pytest.mark.few(1)
def test_groups_in_a_small_pool_end(blocks: int, open_engine: Callable) -> None:
    """Up to 8 prompts are held at a time. A prompt that does not fit twice beside its copy is prefilled apart."""
    engine, prompts = with_blocks(open_engine, GKV, blocks, 64), random_prompts((90, 140, 33, 200, 40, 65, 150, 128))
    expected = apart(engine, prompts)
    with watched(engine) as records:
        rollouts = engine.generate(prompts, SAMPLING)
    assert outcome(rollouts) == outcome(expected)
    assert records.preempted == 0
    assert nothing_is_left(engine)


@pytest.mark.slow
def test_control_holders_without_room_for_a_sample_wait_forever(
    open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompts = with_blocks(open_engine, GKV, 15, 64), random_prompts((90,) * 8)
    ask, pool, steps_left = EvictingManager.get_num_blocks_to_allocate, pool_of(engine), 500

    def ask_without_room(*args: Any, **kwargs: Any) -> int:
        with mock.patch.object(pool, "num_gpu_blocks", 10**6):
            return ask(*args, **kwargs)

    step = engine.llm.llm_engine.step

    def limited() -> Any:
        nonlocal steps_left
        steps_left -= 1
        if not steps_left:
            raise TimeoutError
        return step()

    expected = engine.generate(prompts, SAMPLING)
    with monkeypatch.context() as patch:
        patch.setattr(EvictingManager, "get_num_blocks_to_allocate", ask_without_room)
        patch.setattr(engine.llm.llm_engine, "step", limited)
        with pytest.raises(TimeoutError):
            engine.generate(prompts, SAMPLING)
    assert outcome(engine.generate(prompts, SAMPLING)) == outcome(expected)


@pytest.mark.parametrize("points", [(1, 2, 5, 20), pytest.param(range(1, 61, 3), marks=pytest.mark.slow)], ids=len)
def test_an_interrupted_run_leaves_nothing_behind_in_the_next(points: Sequence[int], open_engine: Callable) -> None:
    """Interrupted before a step: holders wait, are read in chunks, or have given some samples their copies."""
    engine = open_engine(GKV, max_batch=16, max_num_batched_tokens=48, max_model_len=256)
    prompts, llm = random_prompts((40, 90, 33, 64, 20, 150)), engine.llm.llm_engine
    expected, step = outcome(engine.generate(prompts, SAMPLING)), llm.step
    for point in points:
        steps = iter([step] * point)
        with (
            mock.patch.object(llm, "step", lambda steps=steps: next(steps, interrupt)()),
            pytest.raises(KeyboardInterrupt),
        ):
            engine.generate(prompts, SAMPLING)
        assert outcome(engine.generate(prompts, SAMPLING)) == expected
        assert nothing_is_left(engine)


def interrupt() -> None:
    raise KeyboardInterrupt


def at_most(steps: int, step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a `step` that raises TimeoutError instead of one more than `steps` steps."""
    rest = iter([step] * steps)

    def timed_out() -> None:
        raise TimeoutError

    return lambda: next(rest, timed_out)()


@pytest.mark.parametrize("begun", [1, 2])
def test_a_run_that_is_interrupted_within_a_step_leaves_nothing_behind(begun: int, open_engine: Callable) -> None:
    """vLLM does not hear then which holders the step has released. In the second step, the last samples begin."""
    from rollout.vllm.compat.paged import live_state

    engine = open_engine(GKV, shared=True, max_batch=2, max_model_len=256)
    prompts, sampling = random_prompts((40, 90)), replace(SAMPLING, n=2)
    expected = outcome(engine.generate(prompts, sampling))
    state, llm = live_state(), engine.llm.llm_engine
    calls = iter([state.after_forward] * (begun - 1))
    with (
        mock.patch.object(state, "after_forward", lambda: next(calls, interrupt)()),
        pytest.raises(KeyboardInterrupt),
    ):
        engine.generate(prompts, sampling)
    with mock.patch.object(llm, "step", at_most(300, llm.step)):
        assert outcome(engine.generate(prompts, sampling)) == expected
    assert nothing_is_left(engine)


def test_an_interrupted_run_leaves_nothing_to_the_next_engine(open_engine: Callable) -> None:
    """The holder of samples that have not begun is released in the next step, which a closed engine does not have."""
    options, prompts = {"max_batch": 2, "max_model_len": 256}, random_prompts((40, 90))
    engine = open_engine(GKV, **options)
    llm = engine.llm.llm_engine
    steps = iter([llm.step] * 5)
    with mock.patch.object(llm, "step", lambda: next(steps, interrupt)()), pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, SAMPLING)
    assert len(HOLDING) == 1
    engine = open_engine(GKV, **options)
    llm = engine.llm.llm_engine
    with mock.patch.object(llm, "step", at_most(300, llm.step)):
        engine.generate(prompts, SAMPLING)
    assert nothing_is_left(engine)


def test_a_holder_whose_samples_were_aborted_before_it_came_is_a_request_of_its_own(open_engine: Callable) -> None:
    """In a server, aborts overtake requests."""
    from vllm import SamplingParams

    from rollout.vllm.compat.arguments import KEY

    engine = open_engine(GKV, shared=True, max_model_len=256)
    llm, settings = engine.llm.llm_engine, {"place": -1, "seed": 0, "holds": "0"}
    engine.llm.collective_rpc("begin_run", args=(vars(SAMPLING), []))
    llm.add_request("-1", {"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=1, extra_args={KEY: settings}))
    outputs = [output for _ in range(9) for output in llm.step()]
    engine.llm.collective_rpc("end_run", args=([],))
    assert [output.outputs[0].finish_reason for output in outputs if output.finished] == ["length"]
    assert nothing_is_left(engine)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(1,), (3, 4), (6, 12, 40)], ids=str)
def test_preempted_holders_and_samples_do_not_change_results(steps: Sequence[int], open_engine: Callable) -> None:
    """The samples of a holder that is preempted are prefilled apart; a sample that is preempted is sampled again."""
    engine = open_engine(GKV, shared=True, max_batch=8, max_num_batched_tokens=48, max_model_len=256)
    prompts = random_prompts((90, 150, 40))
    expected = engine.generate(prompts, SAMPLING)
    with watched(engine) as records, preempting(engine, lambda step: step in steps):
        rollouts = engine.generate(prompts, SAMPLING)
    assert records.preempted == len(steps)
    assert outcome(rollouts) == outcome(expected)
    engine.generate(prompts, SAMPLING)
    assert nothing_is_left(engine)


# ---- a full cache: vLLM's prefix caching -----------------------------------------------------------------------------


def test_a_full_cache_finds_the_blocks_of_equal_prompts(open_engine: Callable) -> None:
    """All whole blocks, but for the last token of the prompt."""
    engine, prompts = open_engine("full", max_model_len=256), random_prompts(LENGTHS)
    with mock.patch.object(scheduler_of(engine).kv_cache_manager, "enable_caching", False), watched(engine) as records:
        expected = engine.generate(prompts, SAMPLING)
    assert fed(records, expected) == SAMPLING.n * sum(LENGTHS)
    for _ in range(2):  # a call finds nothing of an earlier one
        with watched(engine) as records:
            rollouts = engine.generate(prompts, SAMPLING)
        assert outcome(rollouts) == outcome(expected)
        cached = sum((length - 1) // 32 * 32 for length in LENGTHS)
        assert fed(records, rollouts) == SAMPLING.n * sum(LENGTHS) - (SAMPLING.n - 1) * cached
    assert pool_of(engine).get_num_free_blocks() == pool_of(engine).num_gpu_blocks - 1


def test_prompts_of_replaced_weights_are_not_found(open_engine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the reset, the log-probs follow from the old weights."""
    engine, model = open_engine("full", max_model_len=256), load_model(directory_of("qwen2"))
    prompts, gaps = random_prompts(LENGTHS), {}
    engine.generate(prompts, SAMPLING)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    engine.load_weights(model.named_parameters())
    for reset in (False, True):
        with monkeypatch.context() as patch:
            if not reset:
                patch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
            gaps[reset] = trainer_gap(model, engine.generate(prompts, SAMPLING))
    assert gaps[True] <= 1e-5
    assert gaps[False] >= 0.1


def test_experts_are_recorded_under_a_full_cache(open_engine: Callable) -> None:
    """vLLM would not compute those of a cached prompt, so prefix caching is off."""
    engine, prompts = open_engine("full", "qwen3_moe", max_model_len=256), random_prompts(LENGTHS)
    with watched(engine) as records:
        rollouts = engine.generate(prompts, SAMPLING)
    assert fed(records, rollouts) == SAMPLING.n * sum(LENGTHS)
    assert all(bool((r.trace.further["routed"][:, :-1] >= 0).all()) for r in rollouts)


# ---- other processes, other weights ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", APART, ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_samples_of_one_prefill_in_other_processes(
    family: str, options: dict, open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an update of the weights."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine, prompts = open_engine(GKV, family, max_model_len=256, **options), random_prompts(LENGTHS)
    expected = apart(engine, prompts)
    assert outcome(engine.generate(prompts, SAMPLING)) == outcome(expected)
    model = load_model(directory_of(family))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    engine.load_weights(model.named_parameters())
    rollouts = engine.generate(prompts, SAMPLING)
    assert outcome(rollouts) == outcome(apart(engine, prompts)) != outcome(expected)
    assert trainer_gap(model, rollouts) <= 1e-5
