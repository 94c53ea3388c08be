"""Every policy, through the real cache, drops exactly the entries that its slow per-token reference drops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from feeding import Batch, Fed, dense_output, feed, lengths_around, ragged_batch, run_policy, small_parameters
from policy_cases import BOUNDED, CALIBRATED, EVICTING, SAMPLED
from references import GKV, NEVER, REFERENCES, Disagreement, over_max

from sparse_rl.methods.config import CONFIGS
from sparse_rl.policies import make_policy


def compare(name: str, parameters: dict[str, Any], batch: Batch, fed: Fed, flips_allowed: int = 1) -> tuple[int, int]:
    """Compare rows with their references; return (entries, near ties decided differently, in at most `flips_allowed`
    rows)."""
    assert name in REFERENCES, f"no reference for the policy {name!r}: write one in tests/policies/references.py"
    rows_with_flips = compared = flips = 0
    for row, record in enumerate(fed.records):
        query, key, _ = batch.row(row)
        life = REFERENCES[name](query, key, batch.prompts[row], batch.scaling, parameters, record)
        expected = life.run()
        assert torch.equal(record, expected), f"row {row}: recorded\n{record}\nreference\n{expected}"
        rows_with_flips += life.flips > 0
        flips += life.flips
        compared += record.numel()
    assert rows_with_flips <= flips_allowed, f"{rows_with_flips} rows have near ties that fell the other way"
    return compared, flips


@pytest.fixture
def compare_with_reference(tally: Callable) -> Callable[..., None]:
    """Run `compare` and add its counts to the table of the test run."""
    return lambda name, *arguments, **allowed: tally(name, *compare(name, *arguments, **allowed))


def evicts(fed: Fed) -> bool:
    return any(bool((record < NEVER).any()) for record in fed.records)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("period", [1, 8])
@pytest.mark.parametrize("name", SAMPLED)
def test_each_policy_equals_its_reference(name: str, period: int, sinks: int, compare_with_reference: Callable) -> None:
    policy, batch, fed = run_policy(name, seed=period + sinks, period=period, sinks=sinks)
    compare_with_reference(name, small_parameters(name, period=period, sinks=sinks), batch, fed)
    assert evicts(fed) == (policy.schedule.evicts)


def test_every_policy_has_a_reference() -> None:
    assert set(REFERENCES) == {*SAMPLED, *CALIBRATED}, "every policy needs a reference in tests/policies/references.py"


@pytest.mark.parametrize("pooling", [1, 7])
@pytest.mark.parametrize("redundancy", [False, True])
@pytest.mark.parametrize("form", ["max", "mean", "sum"])
@pytest.mark.parametrize(("period", "sinks"), [(1, 2), (8, 0)])
def test_gkv_equals_its_reference_in_every_form(
    form: str, redundancy: bool, pooling: int, period: int, sinks: int, compare_with_reference: Callable
) -> None:
    parameters = small_parameters(
        "gkv", form=form, redundancy=redundancy, pooling=pooling, period=period, sinks=sinks, budget=14, window=3
    )
    prompts, totals = lengths_around(14, period)
    batch = ragged_batch(20 + period, prompts, totals)
    compare_with_reference("gkv", parameters, batch, feed(make_policy("gkv", **parameters), batch))


EXTREME: dict[str, list[dict[str, Any]]] = {
    "tova": [{"window": 0}, {"window": 1, "sinks": 1}],
    "h2o": [{"window": 0}, {"window": None, "budget": 9}],
    "streaming": [{"sinks": 0}, {"sinks": 11}],
    "snapkv": [{"pooling": 1}, {"pooling": 3, "window": 1}],
    "morphkv": [{"window": 1}, {"window": 11}],
    "rkv": [{"lam": 0.0}, {"lam": 1.0, "pooling": 1}, {"lam": 0.9, "pooling": 5}],
    "gkv": [{"alpha": 0.0}, {"alpha": 1.0, "lam": 0.9}],
    "cake": [{"gamma": 0.0}, {"gamma": 5.0, "sinks": 3}],
    "lined": [{"compression": 2, "sinks": 1}, {"compression": 3, "of": "prompt"}, {"compression": 50}],
}


@pytest.mark.parametrize(("name", "changed"), [(name, changed) for name in EXTREME for changed in EXTREME[name]])
@pytest.mark.parametrize("period", [1, 5])
def test_each_policy_equals_its_reference_at_extreme_parameters(
    name: str, changed: dict[str, Any], period: int, compare_with_reference: Callable
) -> None:
    _, batch, fed = run_policy(name, seed=3, period=period, **changed)
    compare_with_reference(name, small_parameters(name, period=period, **changed), batch, fed)


@pytest.mark.parametrize("name", EVICTING)
def test_default_parameters_equal_those_of_the_reference(name: str, compare_with_reference: Callable) -> None:
    """Each with its own default values."""
    defaults = {field.name: field.default for field in dataclasses.fields(CONFIGS[name])}
    fixed = sum(size for key in ("sinks", "window") if isinstance(size := defaults.get(key), int))
    given = {"budget": max(24, fixed + 8)} if name in BOUNDED else {}
    policy = make_policy(name, **given)
    first = policy.schedule.first(0)
    batch = ragged_batch(5, [4, first + 3], [given.get("budget", 24) + 2, first + 8])
    compare_with_reference(name, given, batch, feed(policy, batch))


@pytest.mark.parametrize("period", [1, 8])
@pytest.mark.parametrize("name", EVICTING)
def test_exact_ties_go_to_the_earlier_position(name: str, period: int, compare_with_reference: Callable) -> None:
    """The keys repeat, and many scores are exactly equal."""
    parameters = small_parameters(name, period=period, sinks=1)
    prompts, totals = lengths_around(12, period)
    batch = ragged_batch(7, prompts, totals, tied=True)
    compare_with_reference(name, parameters, batch, feed(make_policy(name, **parameters), batch))


# R-KV's redundancy is a sum over all keys, which rounds differently in each precision.
@pytest.mark.parametrize(
    "name",
    [name for name in EVICTING if not make_policy(name, **small_parameters(name)).entry_memory and name != "rkv"],
)
def test_policies_without_memory_decide_exact_ties_as_the_reference_does(
    name: str, compare_with_reference: Callable
) -> None:
    """Identical keys have identical scores in both precisions, so no flips are allowed."""
    parameters = small_parameters(name, period=3)
    prompts, totals = lengths_around(12, 3)
    batch = ragged_batch(8, prompts, totals, tied=True)
    compare_with_reference(name, parameters, batch, feed(make_policy(name, **parameters), batch), flips_allowed=0)


def test_gkv_divides_redundancy_by_the_maximum_of_the_competing_tokens(compare_with_reference: Callable) -> None:
    """Here the window has the largest redundancy, but does not compete, so it does not set the scale."""

    class OverAll(GKV):
        """Control: a reference that divides by the maximum over all held entries."""

        def scores(self) -> list[dict[int, float]]:
            lam, result = self.parameters["lam"], []
            for kv in range(self.kv_heads):
                local, repeated = over_max(self.local(kv)), over_max(self.redundancy(kv))
                result.append({j: lam * value - (1 - lam) * repeated[j] for j, value in local.items()})
            return result

    parameters = small_parameters("gkv", budget=18, window=10, lam=0.3)
    batch = ragged_batch(30, [30] * 6, [30] * 6)
    # the keys of the window, positions 20 to 29, are nearly equal
    batch.key[:, :, 20:] = batch.key[:, :, 20:21] + 0.1 * batch.key[:, :, 20:]
    fed = feed(make_policy("gkv", **parameters), batch)
    compare_with_reference("gkv", parameters, batch, fed)
    objections = 0  # control: the other reference must disagree
    for row, record in enumerate(fed.records):
        query, key, _ = batch.row(row)
        try:
            OverAll(query, key, 30, batch.scaling, parameters, record).run()
        except Disagreement:
            objections += 1
    assert objections > 0


# ---- controls: the comparison above can fail ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["one exchanged eviction", "a position early", "a position late"])
@pytest.mark.parametrize("name", EVICTING)
def test_control_wrong_records_are_detected(name: str, fault: str) -> None:
    parameters = small_parameters(name, period=8)
    _, batch, fed = run_policy(name, period=8)
    record = fed.records[1].clone()
    if fault == "one exchanged eviction":
        first_eviction = int(record[0][record[0] < NEVER].min())
        dropped = int((record[0] == first_eviction).nonzero()[0])
        before_window = first_eviction - 4
        kept = int((record[0, :before_window] == NEVER).nonzero()[-1]) if name != "streaming" else first_eviction - 1
        record[0, dropped], record[0, kept] = record[0, kept].clone(), first_eviction
    else:
        record = torch.where(record < NEVER, record + (1 if fault == "a position late" else -1), NEVER)
    query, key, _ = batch.row(1)
    with pytest.raises(Disagreement):
        REFERENCES[name](query, key, batch.prompts[1], batch.scaling, parameters, record).run()


@pytest.mark.parametrize(
    ("name", "first_value", "second_value"),
    [
        *(("gkv", {"form": "max"}, {"form": form}) for form in ("mean", "sum")),
        *(("gkv", {key: a}, {key: b}) for key, a, b in (("redundancy", True, False), ("alpha", 0.8, 0.2))),
        *(("gkv", {key: a}, {key: b}) for key, a, b in (("pooling", 1, 7), ("lam", 0.7, 0.2))),
        ("snapkv", {"pooling": 1}, {"pooling": 7}),
        ("rkv", {"lam": 0.1}, {"lam": 0.9}),
        ("cake", {"gamma": 0.0}, {"gamma": 200.0}),
        ("h2o", {"window": 2}, {"window": 6}),
        ("tova", {"window": 0}, {"window": 6}),
        ("streaming", {"sinks": 2}, {"sinks": 4}),
    ],
)
def test_control_every_parameter_changes_the_trace(
    name: str, first_value: dict[str, Any], second_value: dict[str, Any]
) -> None:
    """Otherwise comparing traces with the reference would not test it."""
    (*_, with_first), (*_, with_second) = run_policy(name, **first_value), run_policy(name, **second_value)
    assert any(not torch.equal(a, b) for a, b in zip(with_first.records, with_second.records, strict=True))


# ---- the sampler attended to the recorded entries -------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 8])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_output_is_dense_attention_under_the_record(name: str, period: int) -> None:
    """Control: evictions recorded one position too early or too late."""
    policy, batch, fed = run_policy(name, seed=11, period=period, sinks=1)
    controls = 0
    for row, record in enumerate(fed.records):
        torch.testing.assert_close(fed.outputs[row], dense_output(policy, batch, row, record), atol=1e-5, rtol=1e-5)
        for shift in (-1, 1):
            if name == "am" and shift == -1:
                continue  # such a trace has other compactions, and a trace of am with other compactions is refused
            moved = torch.where(record < NEVER, record + shift, NEVER)
            if bool((torch.minimum(record, moved) < batch.totals[row] - 1).any()):
                assert (fed.outputs[row] - dense_output(policy, batch, row, moved)).abs().max() > 1e-3
                controls += 1
    assert controls == 0 if name == "full" else controls >= (4 if name == "am" else 8)
