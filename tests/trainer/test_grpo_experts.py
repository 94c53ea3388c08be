"""GRPO of a mixture of experts: the recorded experts are replayed in every step, and the balancing loss counts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eager import largest_difference
from judging import gap, wrong_routes
from learned import learned_policy, with_scorers
from trainer_runs import KillAt, Killed, timeless, trained

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.config import TargetConfig
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.models.head import head_of
from trainer.batches import Batch, trace_of
from trainer.examples import Example
from trainer.scored.loss import ScorerLoss, decisions_agree

NOISE = 1e-5
EXPERTS = 8


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the balancing loss of every forward pass that computes one, by a loop over its tokens and experts."""
    values: list[float] = []

    def counted(choices: dict, mask: torch.Tensor) -> torch.Tensor:
        real = mask.flatten().tolist()
        taken, chances, tokens = [0.0] * EXPERTS, [0.0] * EXPERTS, 0
        for logits, chosen in choices.values():
            for row, experts, is_real in zip(logits.softmax(-1).tolist(), chosen.tolist(), real, strict=True):
                if is_real:
                    tokens += 1
                    chances = [chance + p for chance, p in zip(chances, row, strict=True)]
                    taken = [count + (expert in experts) for expert, count in enumerate(taken)]
        loss = EXPERTS * sum(count / tokens * chance / tokens for count, chance in zip(taken, chances, strict=True))
        values.append(loss)
        ours = plain(choices, mask)
        assert float(ours.detach()) == pytest.approx(loss, rel=1e-5)
        return ours

    from sparse_rl.experts.routing import balancing_loss as plain

    monkeypatch.setattr("trainer.grpo.forward.balancing_loss", counted)
    return values


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True, "per_device_train_batch_size": 4, "steps_per_generation": 2},
        pytest.param({"policy": {"policy": "am", "budget": 8, "window": 3, "period": 4}}, marks=pytest.mark.slow),
    ],
    ids=["plain", "checkpointed, two steps per generation", "fitted"],
)
@pytest.mark.few(1)
def test_the_gap_is_at_most_1e_5_and_the_balancing_loss_is_added(
    settings: dict, grpo: Callable, losses: list[float]
) -> None:
    """In each step the gap is at most 1e-5, and `aux_loss` is the balancing loss of the experts that were taken. So it
    is with full attention in training, where the routers choose themselves, and the gap is large.
    """
    lines = trained(grpo(family="qwen3_moe", max_steps=2, router_aux_loss_coef=0.01, **settings))
    assert max(line["replay/gap_max"] for line in lines if "replay/gap_max" in line) <= NOISE
    assert [line["aux_loss"] for line in lines] == pytest.approx(losses[: len(lines)], rel=1e-4)
    assert all(line["cache/retention"] < 0.95 for line in lines if "cache/retention" in line)
    losses.clear()
    full = {"train_attention": "full", "importance_correction": "none", **settings}
    lines = trained(grpo("full", family="qwen3_moe", max_steps=1, router_aux_loss_coef=0.01, **full))
    assert lines[0]["aux_loss"] == pytest.approx(losses[0], rel=1e-4)
    assert lines[0]["replay/gap_max"] > 1e-3


@pytest.mark.slow
def test_the_balancing_loss_has_gradients(grpo: Callable) -> None:
    """The weight of the balancing loss changes the trained routers. A weight of 0 switches the loss off."""

    def routers(coefficient: float) -> torch.Tensor:
        trainer = grpo(f"c{coefficient}", family="qwen3_moe", max_steps=1, router_aux_loss_coef=coefficient)
        assert all(("aux_loss" in line) is (coefficient > 0) for line in trained(trainer))
        return torch.cat([w.flatten() for name, w in trainer.model.named_parameters() if name.endswith("gate.weight")])

    without, little, much = routers(0.0), routers(0.01), routers(10.0)
    assert not torch.equal(without, little)
    assert not torch.equal(little, much)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_run(grpo: Callable) -> None:
    """A run that is killed in mid-buffer and resumed has the metrics and weights of an uninterrupted run, bit for bit;
    the experts of the buffered completions are in the checkpoint.
    """
    settings: dict[str, Any] = {
        **{"family": "qwen3_moe", "max_steps": 4, "save_strategy": "steps", "save_steps": 3},
        **{"per_device_train_batch_size": 4, "steps_per_generation": 2, "router_aux_loss_coef": 0.01},
    }
    whole = grpo("whole", **settings)
    expected = trained(whole)
    with pytest.raises(Killed):
        grpo("stopped", callbacks=(KillAt(3),), **settings).train()
    second = grpo("stopped", **settings)
    checkpoint = Path(second.args.output_dir) / "checkpoint-3"
    buffer = torch.load(checkpoint / "progress_0.pt", weights_only=True)["buffer"]
    assert all("routed" in trace for batch in buffer for trace in batch["traces"])
    second.train(resume_from_checkpoint=str(checkpoint))
    assert timeless(second.state.log_history)[:-1] == timeless(whole.state.log_history)[:-1]
    assert len(expected) == 4
    weights = whole.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in second.model.state_dict().items())


def test_scorers_learn_under_the_recorded_experts(new_model: Callable, prompts_of: Callable) -> None:
    """While scorers learn, the forward pass takes the recorded experts: under experts that are not the routers' own, it
    has the log-probs of a replay, and the gap to the sampler is at least 0.1 (control). Under the sampler's experts the
    scorers decide as the sampler did.
    """
    policy = learned_policy("mlp", 12, window=4)
    model = with_scorers(new_model("qwen3_moe"), policy)
    engine = make_engine("hf", model=model, policy=policy)
    rollouts = engine.generate(prompts_of("qwen3_moe", (4, 11, 28)), SamplingConfig(30, seed=1, ignore_eos=True))
    wrong = wrong_routes(rollouts, EXPERTS)["next expert"]
    batch = Batch.make([Example.from_rollout(r) for r in wrong], torch.device("cpu"))
    loss = ScorerLoss(policy.config, TargetConfig(), BoundaryConfig(queries=8))
    traces = [trace_of(example) for example in batch.examples]
    with torch.no_grad():
        view = loss.view(model, *batch.sizes(), batch.ids.shape[1], kernel="gather", traces=traces)
        logits = head_of(model)(batch.hidden_under(model, view))
        logprobs = logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
        by_row = list(logprobs.split([len(r.completion_ids) for r in wrong]))
        assert largest_difference(by_row, replay_logprobs(model, wrong)) <= 1e-5
        assert gap(by_row, rollouts) >= 0.1  # control
    assert decisions_agree(model, policy.config, rollouts) >= 0.999
    assert decisions_agree(model, policy.config, wrong) < 0.999
