"""GRPO of a mixture of experts: the recorded experts are replayed in every step, and the balancing loss counts them."""

from __future__ import annotations

import pytest
import torch
from eager import largest_difference
from judging import gap, wrong_routes
from learned import learned_policy, with_scorers
from trainer_runs import trained

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.methods.kvpop.config import BoundaryConfig, TargetConfig
from sparse_rl.methods.kvpop.view import decisions_agree
from sparse_rl.models.load import head_of
from trainer.batch import Batch, Example, trace_of
from trainer.losses import ScorerLoss

NOISE = 1e-5
EXPERTS = 8


@pytest.fixture
def losses(monkeypatch):
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

    from sparse_rl.experts import balancing_loss as plain

    monkeypatch.setattr("trainer.grpo.trainer.balancing_loss", counted)
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
def test_the_gap_is_at_most_1e_5_and_the_balancing_loss_is_added(settings, grpo, losses):
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
def test_the_balancing_loss_has_gradients(grpo):
    def routers(coefficient: float) -> torch.Tensor:
        trainer = grpo(f"c{coefficient}", family="qwen3_moe", max_steps=1, router_aux_loss_coef=coefficient)
        assert all(("aux_loss" in line) is (coefficient > 0) for line in trained(trainer))
        return torch.cat([w.flatten() for name, w in trainer.model.named_parameters() if name.endswith("gate.weight")])

    without, little, much = routers(0.0), routers(0.01), routers(10.0)
    assert not torch.equal(without, little)
    assert not torch.equal(little, much)


def test_scorers_learn_under_the_recorded_experts(new_model, prompts_of):
    """Under wrong experts the log-probs are those of a replay."""
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
