"""GRPO of hybrid models: the states of their layers are remade in every step, without padding and other rows."""

from __future__ import annotations

from typing import Any

import pytest
from judging import shifted
from trainer_runs import trained

from sparse_rl.attention.families import HYBRID
from sparse_rl.data.synthetic import PAD_ID
from sparse_rl.states.mixers import Sequences, States
from sparse_rl.trace import EvictionTrace
from trainer.grpo import trainer as of_grpo
from trainer.grpo.metrics import ReplayGapError

QUICK = ("qwen3_5_text", "lfm2")


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in QUICK else [pytest.mark.slow]) for f in HYBRID])
def test_the_gap_is_at_most_1e_5(family: str, grpo: Any) -> None:
    """Prompts differ in length, so rows are padded on both sides. Dense Granite has a coefficient, but no experts."""
    options = {"gradient_checkpointing": True, "per_device_train_batch_size": 4, "steps_per_generation": 2}
    lines = trained(grpo(family=family, max_steps=2, **options))
    assert max(line["replay/gap_max"] for line in lines if "replay/gap_max" in line) <= 1e-5
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(line["cache/retention"] < 0.95 for line in lines if "cache/retention" in line)


def test_a_family_with_scaled_logits_scores_truncated_draws(grpo: Any) -> None:
    """Falcon-H1 multiplies its logits; so must the engine, and GRPO's own head."""
    lines = trained(grpo(family="falcon_h1", max_steps=1, top_p=0.8))
    assert lines[0]["replay/gap_max"] <= 1e-5


def with_padding(trainer: Any) -> Any:
    """Give the padding token an embedding, as a trained model may have: one of 0 does not change a state."""
    trainer.model.get_input_embeddings().weight.data[PAD_ID].fill_(1.0)
    return trainer


def test_controls_the_guard_stops_padding_in_a_state(grpo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a row in training, or of a prompt in the engine; also a trace that is one position late. Without these
    faults, the run goes on.
    """
    plain = of_grpo.make_view

    def let_in(traces: Any, starts: Any, width: int, *more: Any) -> Any:
        view = plain(traces, starts, width, *more)
        view.states = Sequences((row, 0, width) for row in range(len(starts)))
        return view

    def later(traces: Any, *more: Any) -> Any:
        return plain([EvictionTrace(shifted(t.evict_at, 1), t.further, False) for t in traces], *more)

    def begin_prefill(self: States, lengths: Any) -> None:
        self._prompts = [max(16, *lengths)] * len(lengths)

    faults = ((of_grpo, "make_view", let_in), (States, "begin_prefill", begin_prefill), (of_grpo, "make_view", later))
    for number, (owner, name, fault) in enumerate(faults):
        with monkeypatch.context() as patched, pytest.raises(ReplayGapError, match="replay gap"):
            patched.setattr(owner, name, fault)
            with_padding(grpo(str(number), family="qwen3_5_text")).train()
    assert trained(with_padding(grpo("none", family="qwen3_5_text", max_steps=1)))[0]["replay/gap_max"] <= 1e-5
