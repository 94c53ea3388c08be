"""The experts that the sampler took are replayed, with gradients. Without the record a near tie breaks replay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from dense_matched import dense_logprobs
from judging import gap, trainer_gap, without_routes
from tiny import new_model, policy_of, prompts_of
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from upcycling import STORIES, upcycled

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention import compute_exactly
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import make_view
from sparse_rl.experts import EXPERTS as EXPERTS_FUNCTION
from sparse_rl.experts import WEIGHTS, balancing_loss, routers
from sparse_rl.trace import EvictionTrace, TraceError

LENGTHS = (1, 4, 11, 20, 41)
SAMPLING = SamplingConfig(30, seed=1, ignore_eos=True)
EXPERTS = 8


def next_experts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return copies of the rollouts in which every token takes the experts after those that it took."""

    def changed(trace: EvictionTrace) -> EvictionTrace:
        routed = trace.further["routed"]
        other = ((routed + 1) % EXPERTS).where(routed >= 0, -1).to(torch.int16)
        return EvictionTrace(trace.evict_at, {**trace.further, "routed": other})

    return [replace(r, trace=changed(r.trace)) for r in rollouts]


def replayed_alone(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Return the log-probs of one completion under its trace, in the model's dtype; the model is not adopted again."""
    ids, first = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]]), len(rollout.prompt_ids)
    view = make_view([rollout.trace], [0], ids.shape[1], "cpu")
    logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits[0, first - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, first:, None])[:, 0]


def gradients(model: PreTrainedModel, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.fixture
def attention_in_float32() -> Iterator[Callable[[], None]]:
    """Return a function that lets attention run in float32, in which the order of a sum matters, as on a GPU."""
    yield lambda: compute_exactly(False)
    compute_exactly(True)


def test_a_near_tie_in_a_router_needs_the_record(attention_in_float32: Callable) -> None:
    """Weights of pairs of experts differ by about 1 + 1e-7, and the trainer rounds differently. Control: routers that
    choose."""
    model = new_model("qwen3_moe", num_experts_per_tok=1, num_hidden_layers=3)
    generator = torch.Generator().manual_seed(3)
    for _, _, router in routers(model):
        half = router.weight.data[: EXPERTS // 2]
        router.weight.data[EXPERTS // 2 :] = half * (1 + 1e-7 * torch.randn(half.shape, generator=generator))
    engine = make_engine("hf", model=model, policy=policy_of("gkv", budget=20, window=4, period=8))
    rollouts = engine.generate(prompts_of("qwen3_moe", (*LENGTHS, 66)), SamplingConfig(60, seed=1, ignore_eos=True))
    attention_in_float32()
    assert trainer_gap(model, rollouts) <= 1e-5
    alone = trainer_gap(model, without_routes(rollouts))
    assert alone > 0.1


@pytest.mark.slow
def test_a_trained_model_needs_products_that_do_not_depend_on_the_rows() -> None:
    """Control: under transformers' `grouped_mm` the gap is above 1e-5."""
    prompts = prompts_of("stories260K", (1, 4, 11, 19, 20, 28, 41, 66))
    model = upcycled(STORIES, "mixtral")
    gaps = {}
    for implementation in (EXPERTS_FUNCTION, "grouped_mm"):
        engine = make_engine("hf", model=model, policy=policy_of("gkv", budget=20, window=4, period=8))
        model.set_experts_implementation(implementation)  # the engine has adopted the model
        rollouts = engine.generate(prompts, SamplingConfig(120, seed=1, ignore_eos=True))
        with torch.no_grad():
            gaps[implementation] = gap([replayed_alone(model, r) for r in rollouts], rollouts)
    assert gaps[EXPERTS_FUNCTION] <= 1e-5 < gaps["grouped_mm"], gaps


@pytest.mark.parametrize("family", WEIGHTS)
@pytest.mark.few(2)
def test_gradients_of_a_replay_equal_those_of_the_plain_model(family: str) -> None:
    """With a full cache and the routers' own choices. Control: other experts."""
    model = new_model(family)
    rollouts = make_engine("hf", model=model, policy=policy_of("full")).generate(prompts_of(family, LENGTHS), SAMPLING)

    def plain() -> Tensor:
        total = torch.tensor(0.0)
        for r in rollouts:
            ids, first = torch.tensor([[*r.prompt_ids, *r.completion_ids]]), len(r.prompt_ids)
            logprobs = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].log_softmax(-1)
            total = total + logprobs.gather(-1, ids[0, first:, None]).sum()
        return total

    def replayed(sampled: Sequence[Rollout]) -> Tensor:
        return torch.stack([values.sum() for values in replay_logprobs(model, sampled)]).sum()

    ours, theirs = gradients(model, lambda: replayed(rollouts)), gradients(model, plain)
    other = gradients(model, lambda: replayed(next_experts(rollouts)))
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        torch.testing.assert_close(ours[name], wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    router = next(name for name in theirs if name.endswith(("mlp.gate.weight", "router.weight")))
    assert (other[router] - theirs[router]).abs().max() > 0.1 * theirs[router].abs().max()  # control


@pytest.mark.parametrize("family", WEIGHTS)
@pytest.mark.few(2)
def test_recorded_experts_give_the_router_its_gradient(family: str) -> None:
    """Finite differences in float64, under evictions and other experts; checkpointing gives the same bits."""
    model = new_model(family)
    engine = make_engine("hf", model=model, policy=policy_of("gkv", budget=20, window=4, period=8))
    rollouts = next_experts(engine.generate(prompts_of(family, LENGTHS[2:]), SAMPLING))

    def total() -> Tensor:
        return torch.stack([values.sum() for values in replay_logprobs(model, rollouts)]).sum()

    def total_alone(of: PreTrainedModel) -> Tensor:
        return torch.stack([replayed_alone(of, r).sum() for r in rollouts]).sum()

    plain = gradients(model, total)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = gradients(model, total)
    assert all(torch.equal(checkpointed[name], plain[name]) for name in plain)

    exact = copy.deepcopy(model).double().eval()
    _, _, router = list(routers(exact))[-1]
    wanted = gradients(exact, lambda: total_alone(exact))
    name = next(name for name, weight in exact.named_parameters() if weight is router.weight)
    direction = wanted[name] / wanted[name].norm()
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            router.weight.add_(sign * 1e-2 * direction)
            values.append(float(total_alone(exact)))
            router.weight.sub_(sign * 1e-2 * direction)
    difference = (values[0] - values[1]) / 2e-2  # the routers' softmax stays in float32
    assert difference == pytest.approx(float(wanted[name].norm()), rel=1e-2)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_balancing_loss_equals_that_of_transformers(family: str) -> None:
    """With its gradients, to the bit, in a left-padded batch. Control: other experts."""
    model = adopt(new_model(family))
    rollouts = make_engine("hf", model=model, policy=policy_of("full")).generate(prompts_of(family, LENGTHS), SAMPLING)
    rows = [[*r.prompt_ids, *r.completion_ids] for r in rollouts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    starts = mask.argmax(-1)
    positions = (torch.arange(width) - starts[:, None]).clamp(min=0)

    def choices(sampled: Sequence[Rollout]) -> dict:
        view = make_view([r.trace for r in sampled], starts.tolist(), width, "cpu")
        model(input_ids=ids, attention_mask=NO_MASK, position_ids=positions, kv_view=view, use_cache=False)
        return view.routers.choices

    routed = choices(rollouts)
    ours = balancing_loss(routed, mask)
    theirs = load_balancing_loss_func(tuple(routed[layer][0] for layer in sorted(routed)), EXPERTS, 2, mask)
    assert torch.equal(ours, theirs)
    _, _, router = next(routers(model))
    (own,) = torch.autograd.grad(ours, router.weight, retain_graph=True)
    (wanted,) = torch.autograd.grad(theirs, router.weight)
    assert torch.equal(own, wanted)
    assert not torch.equal(balancing_loss(choices(next_experts(rollouts)), mask), ours)  # control


def test_a_prompt_takes_the_same_experts_alone_in_a_batch_and_with_several_samples() -> None:
    """Also if rows end early, and for any completion."""
    model = new_model("qwen3_moe")
    engine = make_engine("hf", model=model, policy=policy_of("gkv", budget=20, window=4, period=8))
    prompts, sampling = prompts_of("qwen3_moe", LENGTHS), SamplingConfig(200, seed=1, n=2)
    batch = engine.generate(prompts, sampling)
    assert len({len(r.completion_ids) for r in batch}) > 2
    again = engine.generate(prompts[2:3], sampling)
    by_prompt = [r for r in batch if r.prompt_ids == prompts[2]]
    for alone, together in zip(again, by_prompt, strict=True):
        length = min(len(alone.trace), len(together.trace)) - 1
        same = [a == b for a, b in zip(alone.completion_ids, together.completion_ids, strict=False)]
        agree = len(prompts[2]) + (same.index(False) if False in same else len(same))
        length = min(length, agree)
        assert torch.equal(alone.trace.further["routed"][:, :length], together.trace.further["routed"][:, :length])
    with torch.no_grad():
        assert trainer_gap(model, batch) <= 1e-5
        dense = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in batch]
        assert gap(dense, batch) <= 1e-5


def test_a_record_of_another_model_is_refused() -> None:
    """More experts, or more choices for each token, than the model has."""
    model = new_model("qwen3_moe")
    engine = make_engine("hf", model=model, policy=policy_of("full"))
    (rollout,) = engine.generate(prompts_of("qwen3_moe", (5,)), SAMPLING)
    fewer = new_model("qwen3_moe", num_experts=2)
    with pytest.raises(TraceError, match=r"experts up to 7 in layer 0, but its router chose \[\d+, 2\] of 2 experts"):
        replay_logprobs(fewer, [rollout])
    one = new_model("qwen3_moe", num_experts_per_tok=1)
    with pytest.raises(TraceError, match=r"but its router chose \[\d+, 1\] of 8 experts"):
        replay_logprobs(one, [rollout])


def test_adopting_twice_attaches_once() -> None:
    """A second `adopt` adds no hook. A copy of an adopted model has hooks of its own."""
    model = adopt(adopt(new_model("qwen3_moe")))
    _, layer, router = next(routers(model))
    assert len(layer._forward_pre_hooks) == len(router._forward_hooks) == 1
    _, copied_layer, copied = next(routers(copy.deepcopy(model)))
    (hook,) = copied_layer._forward_pre_hooks.values()
    assert hook.__self__ is copied.routes is not router.routes
