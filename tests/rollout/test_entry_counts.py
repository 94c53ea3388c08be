"""The counts of cache entries that an evaluation and training report."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import model_of, policy_of, prompts_of

from rollout import SamplingConfig, make_engine
from rollout.engine import Turn
from rollout.measure.accuracy import entry_counts, totals, turn_counts
from trainer.grpo.metrics import held_entries


def test_completions_of_one_token_are_left_out_of_the_mean() -> None:
    """No query decodes them. Control: a longer completion counts."""
    engine = make_engine(
        "hf", model=model_of("quickstart"), policy=policy_of("streaming", budget=40, sinks=1, period=8)
    )
    lines: list[dict[str, Any]] = []
    for tokens in (1, 3):
        sampling = SamplingConfig(tokens, seed=1, ignore_eos=True)
        (rollout,) = engine.generate(prompts_of("quickstart", (12,)), sampling)
        lines.append({"retention": 1.0, "seconds": 1.0, **entry_counts(rollout, engine.policy)})
    assert [line["mean_entries"] for line in lines] == [None, 13.5]
    assert totals(lines, 4)["mean_entries"] == pytest.approx(13.5)
    assert totals(lines[:1], 1)["mean_entries"] is None


def test_a_conversation_counts_what_its_queries_read() -> None:
    """Under clustered attention, which reads answers one by one, this is less than it holds. Under a policy that reads
    chunks, a chunk's last query reads all of it, which is more than the schedule says."""
    first, answer = prompts_of("quickstart", (12, 30))
    sampling, pages = SamplingConfig(1, seed=1, ignore_eos=True), {"page": 4, "window": 4, "open_pages": 1}
    read = dict[str, Any]()
    for policy in ({"policy": "clustered", **pages}, policy_of("streaming", budget=8, sinks=1, period=4)):
        engine = make_engine("hf", model=model_of("quickstart"), policy=policy)
        ((_, held),) = engine.converse([Turn(first, 20)], sampling)
        ((rollout, _),) = engine.converse([Turn(answer, 20, held)], sampling, keep=False)
        read[engine.policy.name] = turn_counts([rollout], engine.policy)
    assert 8 < read["clustered"]["read_entries"] < read["clustered"]["peak_entries"] == 12 + 20 + 30 + 20 - 1
    assert read["streaming"]["read_entries"] == read["streaming"]["peak_entries"] > 8 + 30


@pytest.mark.parametrize("budget", [40, {"tokens": [20, 90], "entries": [16, 50]}])
@pytest.mark.parametrize(("prompt", "tokens"), [(12, 60), (30, 70), (70, 3)])
def test_peaks_are_those_of_the_sequence(budget: Any, prompt: int, tokens: int) -> None:
    """Control: with a compaction of which the last queries see nothing, the budget's last peak is above the trace's."""
    policy = policy_of("streaming", budget=budget, sinks=1, period=8)
    engine = make_engine("hf", model=model_of("quickstart"), policy=policy)
    rollouts = engine.generate(prompts_of("quickstart", (prompt,)), SamplingConfig(tokens, seed=1, ignore_eos=True))
    trace = rollouts[0].trace
    most = max(int(trace.kept_counts(query).max()) for query in range(prompt, len(trace) - 1))
    counts = entry_counts(rollouts[0], policy)
    assert [counts["peak_entries"], counts["read_entries"]] == [most, most]
    assert held_entries(rollouts, policy) == [max(prompt, most)]
    assert most < policy.schedule.left(prompt, len(trace) - 1) + policy.schedule.period or budget == 40
