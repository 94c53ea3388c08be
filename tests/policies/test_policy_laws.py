"""Laws that every policy obeys: when it compacts, how many and which entries it keeps, and how it is named and
rebuilt."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from feeding import CPU, dense_output, feed, lengths_around, ragged_batch, run_policy, small_parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import BOUNDED, EVICTING, SAMPLED
from references import NEVER
from test_policy_exactness import compare

from sparse_rl.errors import StoppedError
from sparse_rl.methods.config import CONFIGS, EvictingConfig, accepted_parameters
from sparse_rl.policies import Entries, Kept, Policy, fingerprint, make_policy, rules
from sparse_rl.policies.cache import EvictingCache


class GivenConfig(EvictingConfig):
    name = "given"


class Given(Policy):
    """A policy that scores each entry by its position, with scores that the test supplies."""

    def __init__(self, scores_by_position: torch.Tensor, budget: int, **parameters: Any) -> None:
        super().__init__(GivenConfig(budget=budget, **parameters))
        self.scores_by_position = scores_by_position

    def score(self, layer: int, entries: Entries) -> torch.Tensor:
        return self.scores_by_position[entries.positions]

    def choose(self, positions: list[list[int]], seen: list[int]) -> Kept:
        """Return the entries that a compaction of one kv head keeps."""
        return self.compact(0, replace(entries_at(positions, seen), left=[self.config.budget] * len(seen)))


def held_after(record: torch.Tensor, seen: int) -> list[list[int]]:
    """Return the positions that each kv head holds after `seen` tokens, after the compaction if there is one."""
    return [[t for t in range(seen) if int(head[t]) > seen] for head in record]


# ---- times and sizes of compactions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("period", [1, 8])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_cache_follows_the_policys_schedule(name: str, period: int, sinks: int) -> None:
    """After every pass, in order of position, each entry with its own token's key and value."""
    policy = make_policy(name, **small_parameters(name, period=period, sinks=sinks))
    prompts, totals = lengths_around(12, period)
    batch = ragged_batch(1, prompts, totals)
    snapshots: list[tuple[list[int], torch.Tensor]] = []

    def check_cache(cache: EvictingCache) -> None:
        layer = cache.layers[0]
        snapshots.append((list(cache.seen), layer.positions.clone()))
        for row, seen in enumerate(cache.seen):
            length = policy.schedule.held(prompts[row], seen)
            assert cache.lengths[row] == length
            positions = layer.positions[row, :, :length]
            assert bool((positions.diff(dim=-1) > 0).all()), "not in order of position"
            assert int(positions.min()) >= 0
            assert int(positions.max()) < seen
            pairs = ((batch.key, layer.keys), (batch.value, layer.values))
            for fed_tensor, buffer in pairs[:1] if name == "am" else pairs:  # am replaces the values
                wide = positions[..., None].expand(-1, -1, buffer.shape[-1])
                assert torch.equal(buffer[row, :, :length], fed_tensor[row].gather(1, wide))

    fed = feed(policy, batch, check_cache)
    for seens, positions in snapshots:
        for row, seen in enumerate(seens):
            length = policy.schedule.held(prompts[row], seen)
            assert positions[row, :, :length].tolist() == held_after(fed.records[row], seen)


@pytest.mark.parametrize("period", [1, 8])
@pytest.mark.parametrize("name", EVICTING)
def test_compactions_leave_the_budget_and_queries_never_exceed_the_peak(name: str, period: int) -> None:
    """The peak is budget + period; the prompt's queries see all tokens before them."""
    policy, batch, fed = run_policy(name, period=period)
    bounded = name in BOUNDED  # the other policies' numbers of entries grow
    budget = 12
    assert policy.schedule.peak == (budget + period if bounded else None)
    peaks = []
    for row, record in enumerate(fed.records):
        prompt, total = batch.prompts[row], batch.totals[row]
        for seen in range(prompt, total + 1):
            held = {len(head) for head in held_after(record, seen)}
            assert len(held) == 1, "the heads hold different counts"
            if policy.schedule.due(prompt, seen):
                assert held == {policy.schedule.left(prompt, seen)}
                assert not bounded or held == {budget}
        attended = [sum(int(at) > q for at in record[0, : q + 1]) for q in range(prompt, total)]
        peaks.append(max(attended, default=0))
        assert peaks[-1] == policy.schedule.most_decoding(prompt, total) or total == prompt
        for q in range(prompt):  # the prefill is dense
            assert bool((record[:, : q + 1] > q).all())
    assert not bounded or max(peaks) == policy.schedule.peak, "the peak is never reached"


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("period", [1, 8])
@pytest.mark.parametrize("name", EVICTING)
def test_sinks_and_window_are_never_evicted(name: str, period: int, sinks: int) -> None:
    """And nothing before the first compaction. Control: without sinks, the first tokens are evicted."""
    policy, batch, fed = run_policy(name, seed=2, period=period, sinks=sinks)
    assert policy.config.sinks == sinks
    evicted_first_tokens = 0
    for record, prompt in zip(fed.records, batch.prompts, strict=True):
        assert bool((record[:, : policy.config.sinks] == NEVER).all())
        evicted = (record < NEVER).nonzero()
        times = record[record < NEVER]
        assert bool((evicted[:, 1] < times - policy.config.window).all()), "a token of the window was evicted"
        evicted_first_tokens += int((record[:, :3] < NEVER).sum())
        assert bool((times >= policy.schedule.first(prompt)).all()), "evicted before the first compaction"
    # h2o and lined keep the tokens with the most accumulated attention, which are the first tokens
    if not sinks and name not in ("h2o", "lined"):
        assert evicted_first_tokens > 0, "control: without sinks, the first tokens are evicted"


def test_full_never_evicts() -> None:
    policy, _, fed = run_policy("full")
    assert all(bool((record == NEVER).all()) for record in fed.records)
    assert policy.schedule.peak is None
    assert not policy.schedule.evicts
    assert policy.schedule.held(7, 1000) == 1000
    assert not policy.schedule.due(7, 1000)


@pytest.mark.parametrize("name", ["full", *BOUNDED])
def test_a_sequence_that_never_exceeds_the_peak_loses_no_entry(name: str) -> None:
    policy = make_policy(name, **small_parameters(name, period=3))
    batch = ragged_batch(4, [2, 12], [12, 14])  # the first compaction would be at 12 + 3 = 15 tokens
    fed = feed(policy, batch)
    for row, record in enumerate(fed.records):
        assert bool((record == NEVER).all())
        torch.testing.assert_close(fed.outputs[row], dense_output(policy, batch, row, record), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["tova", "snapkv"])
def test_slots_said_to_be_older_hold_entries_that_all_last_queries_see(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the rows of a batch hold different numbers of entries, and if the window is longer than the period."""
    policy, older, newer = make_policy(name, **small_parameters(name, period=2)), 0, 0
    compact = type(policy).compact

    def watch(self: Policy, layer: int, entries: Entries) -> Kept:
        nonlocal older, newer
        seen_by_all = entries.valid() & (entries.positions < (entries.seen - self.last_queries)[:, None, None])
        assert bool(seen_by_all[..., : entries.older].all())
        older += entries.older
        newer += int((~seen_by_all[..., entries.older : entries.older + 1]).any())  # control: one more would be wrong
        return compact(self, layer, entries)

    monkeypatch.setattr(type(policy), "compact", watch)
    feed(policy, ragged_batch(3, [5, 17, 30], [40, 40, 44]))
    assert older > 100
    assert newer > 10


@pytest.mark.parametrize("name", SAMPLED)
def test_a_trace_does_not_depend_on_the_batch(name: str) -> None:
    policy, batch, fed = run_policy(name, period=8, sinks=1)
    for row in (0, 4):
        alone = type(batch)(*(values[row : row + 1] for values in vars(batch).values()))
        assert torch.equal(feed(policy, alone).records[0], fed.records[row])


@pytest.mark.parametrize("name", EVICTING)
def test_layers_stacked_in_one_call_equal_separate_calls(name: str) -> None:
    """Stacked along the row dimension R."""
    policy = make_policy(name, **small_parameters(name, period=3))
    compacted_entries: list[Entries] = []

    class Listening(type(policy)):  # type: ignore[misc]
        def compact(self, layer: int, entries: Entries) -> Kept:
            state = {key: value.clone() for key, value in entries.state.items()}
            tensors = {key: value.clone() for key, value in vars(entries).items() if isinstance(value, torch.Tensor)}
            compacted_entries.append(replace(entries, **tensors, state=state))
            return super().compact(layer, entries)

    for seed in (1, 2):  # two layers, fed separately
        feed(Listening(policy.config), ragged_batch(seed, [5, 17, 15], [24, 30, 26]))
    assert len(compacted_entries) % 2 == 0
    assert len(compacted_entries) > 6
    half = len(compacted_entries) // 2
    for first, second in zip(compacted_entries[:half], compacted_entries[half:], strict=True):
        alone = [policy.compact(layer, copy_of(entries)) for layer, entries in enumerate((first, second))]
        together = policy.compact(0, stacked(first, second))
        assert torch.equal(together.keep, torch.cat([kept.keep for kept in alone]))
        for key, value in together.state.items():
            assert torch.equal(value, torch.cat([kept.state[key] for kept in alone]))


def copy_of(entries: Entries) -> Entries:
    return replace(entries, state={key: value.clone() for key, value in entries.state.items()})


def stacked(a: Entries, b: Entries) -> Entries:
    """Concatenate the rows of two groups of entries."""
    joined = {key: torch.cat([value, vars(b)[key]]) for key, value in vars(a).items() if torch.is_tensor(value)}
    state = {key: torch.cat([value, b.state[key]]) for key, value in a.state.items()}
    return replace(a, **joined, state=state, left=[*a.left, *b.left])


class Lopsided(Given):
    """A policy that keeps one entry less in the last kv head than in the other heads."""

    def compact(self, layer: int, entries: Entries) -> Kept:
        kept = super().compact(layer, entries)
        first = kept.keep[:, -1].int().argmax(-1)
        kept.keep[torch.arange(len(first)), -1, first] = False
        return kept


def test_a_policy_that_keeps_different_numbers_in_different_heads_is_refused() -> None:
    """By engines whose caches have one length for all heads. Control: the same number in every head."""
    batch = ragged_batch(0, [5, 9], [20, 20])
    feed(Given(torch.arange(40.0), budget=8, period=2), batch)  # control
    message = (
        r"^given: a compaction left \[8, 7\] entries in the kv heads of a sequence, but the schedule says 8; [^\n]*$"
    )
    with pytest.raises(StoppedError, match=message):
        feed(Lopsided(torch.arange(40.0), budget=8, period=2), batch)


@pytest.mark.parametrize("name", SAMPLED)
def test_layers_do_not_influence_each_other(name: str) -> None:
    policy = make_policy(name, **small_parameters(name, period=2))
    batches = [ragged_batch(seed, [5, 17], [20, 20]) for seed in (1, 2)]
    cache = EvictingCache(policy)
    cache.begin_prefill([5, 17], CPU)
    for layer, b in enumerate(batches):  # copies: the cache takes a prompt's keys and values over as its own buffers
        cache.attend(layer, *(x[:, :, :17].clone() for x in (b.query, b.key, b.value)), b.scaling)
    for step in range(3):
        cache.begin_decode([True, True], CPU)
        at = torch.tensor([5, 17]) + step
        for layer, b in enumerate(batches):
            q, k, v = (x[torch.arange(2), :, at][:, :, None] for x in (b.query, b.key, b.value))
            cache.attend(layer, q, k, v, b.scaling)
    for layer, b in enumerate(batches):
        b.totals = [8, 20]
        alone = feed(policy, b)
        for row in range(2):
            assert torch.equal(cache.evict_at(row, b.totals[row])[layer], alone.records[row])


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_policy_at_any_size_equals_its_reference(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(EVICTING), "policy")
    sinks, window = data.draw(st.integers(0, 3), "sinks"), data.draw(st.integers(1, 5), "window")
    budget = sinks + window + data.draw(st.integers(1, 6), "long range")
    parameters = small_parameters(
        name, budget=budget, sinks=sinks, window=window, period=data.draw(st.integers(1, 6), "period")
    )
    prompts = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3), "prompts")
    totals = [p + data.draw(st.integers(1, 16), "completion") for p in prompts]
    batch = ragged_batch(data.draw(st.integers(0, 9), "seed"), prompts, totals)
    compare(name, parameters, batch, feed(make_policy(name, **parameters), batch))


# ---- which entries --------------------------------------------------------------------------------------------------


def entries_at(positions: list[list[int]], seen: list[int]) -> Entries:
    """Return the entries of one kv head at the given positions, padded at the end."""
    width = max(len(row) for row in positions)
    padded = torch.tensor([[row + [0] * (width - len(row))] for row in positions])
    zeros = torch.zeros(len(positions), 1, width, 2)
    lengths = torch.tensor([len(row) for row in positions])
    return Entries(zeros, zeros, padded, lengths, torch.tensor(seen), None, 1.0, {"age": padded.float()})


def slots(kept: Kept) -> list[list[list[int]]]:
    """Return the slots of the kept entries of each row and head, in ascending order."""
    return [[head.nonzero()[:, 0].tolist() for head in row] for row in kept.keep]


def test_among_equal_scores_the_earliest_entries_are_kept() -> None:
    """In order of position; the state ("age", here the position) moves with the entries."""
    policy = Given(torch.ones(40), budget=6, sinks=1, window=2, period=4)
    rows = [[0, 3, 4, 7, 8, 20, 21, 29, 30, 31], list(range(10))]
    kept = policy.choose(rows, [32, 10])
    assert slots(kept) == [[[0, 1, 2, 3, 8, 9]], [[0, 1, 2, 3, 8, 9]]]
    assert kept.state["age"][kept.keep].tolist() == [0, 3, 4, 7, 30, 31, 0, 1, 2, 3, 8, 9]


def test_compact_keeps_the_best_competing_entries() -> None:
    """And sinks and window; the expected positions are sorted in plain Python."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        scores_by_position = torch.randint(0, 4, (40,), generator=generator).float()  # many exact ties
        sinks, window, budget = seed % 3, seed % 4, 7
        rows = [torch.randperm(30, generator=generator)[: 9 + row].tolist() for row in range(3)]  # in any order
        seen = [max(row) + 1 for row in rows]
        kept = Given(scores_by_position, budget, sinks=sinks, window=window, period=2).choose(rows, seen)
        for row, positions in enumerate(rows):
            protected = [j for j in positions if j < sinks or j >= seen[row] - window]
            competing = sorted(set(positions) - set(protected), key=lambda j: (-float(scores_by_position[j]), j))
            expected = sorted(protected + competing[: budget - len(protected)])
            assert sorted(positions[slot] for slot in slots(kept)[row][0]) == expected


@pytest.mark.parametrize(
    ("scores", "sizes", "rows", "kept"),
    [  # the padding of a short row names position 0, which has the best score in the first case
        (torch.arange(40, 0, -1).float(), {"budget": 3}, [[5, 6, 7, 8], list(range(12))], [[0, 1, 2], [0, 1, 2]]),
        (
            torch.full((40,), -torch.inf),
            {"budget": 4, "window": 1},
            [[5, 6, 7, 8, 9], list(range(12))],
            [[0, 1, 2, 4], [0, 1, 2, 11]],
        ),
        (torch.full((40,), torch.inf), {"budget": 5, "sinks": 1, "window": 2}, [list(range(12))], [[0, 1, 2, 10, 11]]),
    ],
    ids=["best", "-inf", "inf"],
)
def test_padding_is_never_kept_but_sinks_and_window_always(
    scores: torch.Tensor, sizes: dict[str, int], rows: list[list[int]], kept: list[list[int]]
) -> None:
    chosen = Given(scores, period=1, **sizes).choose(rows, [row[-1] + 1 for row in rows])
    assert slots(chosen) == [[head] for head in kept]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0]), min_size=4, max_size=30))
def test_entries_rank_by_their_scores_for_any_floats(scores: list[float]) -> None:
    """Infinities, denormals and both zeros. Of equal scores, the earlier ranks first."""
    scores_by_position = torch.tensor(scores)
    kept = Given(scores_by_position, budget=3, period=1).choose([list(range(len(scores)))], [len(scores)])
    assert slots(kept)[0][0] == sorted(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:3])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", EVICTING)
def test_results_do_not_depend_on_the_order_of_entries(name: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM passes entries unordered. Control: policies that assume an order."""
    compactions = 0

    def shuffled(self: Policy, layer: int, entries: Entries) -> Kept:
        nonlocal compactions
        compactions += 1
        noise = torch.rand(entries.positions.shape, generator=generator)
        noise = noise[:, :1].expand_as(noise) if name == "tova" else noise  # the kv heads of tova hold the same tokens
        order = noise.masked_fill(~entries.valid(), 2.0).argsort(-1)
        moved = {
            key: value.gather(2, order if value.ndim == 3 else order[..., None].expand_as(value))
            for key, value in {**vars(entries), **entries.state}.items()
            if key in ("keys", "values", "positions", *entries.state) and value is not None
        }
        state = {key: moved.pop(key) for key in entries.state}
        kept = compact(self, layer, replace(entries, **moved, state=state, older=0))
        back = {key: torch.empty_like(value).scatter_(2, order, value) for key, value in kept.state.items()}
        values = kept.values
        if values is not None:
            values = torch.empty_like(values).scatter_(2, order[..., None].expand_as(values), values)
        return Kept(torch.empty_like(kept.keep).scatter_(2, order, kept.keep), back, values)

    policy = make_policy(name, **small_parameters(name, period=3, sinks=1))
    batch = ragged_batch(3, [5, 17, 30], [40, 40, 44], tied=tied)
    plain = feed(policy, batch)
    generator = torch.Generator().manual_seed(0)
    compact = type(policy).compact
    monkeypatch.setattr(type(policy), "compact", shuffled)
    for ours, theirs in zip(feed(policy, batch).records, plain.records, strict=True):
        assert torch.equal(ours, theirs)
    assert compactions > 10
    # control: the order of the cache slots is taken for the order of positions
    slot_order = torch.arange(1000)
    monkeypatch.setattr(Entries, "by_position", lambda e: slot_order[: e.positions.shape[2]].expand_as(e.positions))
    similarity = rules.mean_similarity
    monkeypatch.setattr(
        rules, "mean_similarity", lambda k, p, n: similarity(k, slot_order[: p.shape[2]].expand_as(p), n)
    )
    by_slot = feed(policy, batch).records
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(by_slot, plain.records, strict=True))
    needs_order = name in ("snapkv", "rkv", "gkv") or (name == "am" and tied)
    assert same == (not needs_order)


def declared_inputs(name: str) -> set[str]:
    """Return the inputs that a policy declares for its score: "queries", "keys"."""
    policy = make_policy(name, **small_parameters(name))
    queries = {"queries"} if policy.last_queries or policy.every_query else set()
    return queries | {*policy.score_reads, *(policy.observe_reads if policy.every_query else ())}


def test_policies_declare_if_their_scores_read_queries_and_keys() -> None:
    assert not declared_inputs("streaming")
    assert declared_inputs("h2o") == declared_inputs("gkv") == {"queries", "keys"}


@pytest.mark.parametrize("name", [n for n in EVICTING if "queries" in declared_inputs(n)])
def test_a_nan_score_is_an_error(name: str) -> None:
    policy = make_policy(name, **small_parameters(name))
    batch = ragged_batch(0, [20], [21])
    feed(policy, batch)  # control: without a NaN it runs
    batch.query[0, 1, 19] = float("nan")
    with pytest.raises(
        FloatingPointError, match=rf"^{name}: a NaN score in layer 0; .*not finite, or the policy's score is wrong$"
    ):
        feed(policy, batch)
    if "keys" in declared_inputs(name):  # while decoding
        batch = ragged_batch(0, [5], [20])
        batch.key[0, 0, 12] = float("nan")
        with pytest.raises(FloatingPointError, match="NaN score"):
            feed(policy, batch)


@pytest.mark.parametrize("name", EVICTING)
def test_nan_in_padding_does_not_change_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM writes a sequence's state for padding into a block that also pads other sequences."""
    policy = make_policy(name, **small_parameters(name, period=3, sinks=1))
    batch = ragged_batch(3, [5, 17, 30], [40, 40, 44])
    plain = feed(policy, batch)
    poisoned = 0

    def poison(entries: Entries) -> Entries:
        nonlocal poisoned
        padding = ~entries.valid()
        poisoned += int(padding.sum()) * len(entries.state)
        state = {key: value.masked_fill(padding, math.nan) for key, value in entries.state.items()}
        return replace(entries, state=state)

    compact, observe = type(policy).compact, type(policy).observe
    monkeypatch.setattr(type(policy), "compact", lambda self, layer, entries: compact(self, layer, poison(entries)))

    def watch(self: Policy, layer: int, entries: Entries, *seen: torch.Tensor) -> None:
        with_nan = poison(entries)
        observe(self, layer, with_nan, *seen)
        for key, value in with_nan.state.items():
            entries.state[key].copy_(value)

    monkeypatch.setattr(type(policy), "observe", watch)
    for ours, theirs in zip(feed(policy, batch).records, plain.records, strict=True):
        assert torch.equal(ours, theirs)
    assert (poisoned > 0) == bool(policy.entry_memory)  # only these policies have a state for each entry


def test_a_nan_score_is_an_error_only_for_a_competing_entry() -> None:
    """NaN scores of sinks and window are ignored; without a window, position 9 competes and its NaN is an error."""
    scores_by_position = torch.ones(10)
    scores_by_position[[0, 9]] = float("nan")
    kept = Given(scores_by_position, budget=5, sinks=1, window=1, period=1).choose([list(range(10))], [10])
    assert slots(kept) == [[[0, 1, 2, 3, 9]]]
    kept.check_finite(0, "given")
    # beside it, a row without position 9
    kept = Given(scores_by_position, budget=5, sinks=1, period=1).choose([list(range(10)), list(range(9))], [10, 9])
    assert kept.failed is not None
    assert kept.failed.tolist() == [True, False]
    with pytest.raises(FloatingPointError, match=r"^given: a NaN score in layer 0"):
        kept.check_finite(0, "given")


def test_tova_keeps_the_same_tokens_in_every_kv_head() -> None:
    (*_, tova), (*_, morphkv) = (run_policy(name, period=8) for name in ("tova", "morphkv"))
    for record in tova.records:
        assert torch.equal(record[0], record[1])
    different = [not torch.equal(record[0], record[1]) for record in morphkv.records]
    assert any(different), "control: other methods choose per kv head"


def test_streaming_keeps_the_sinks_and_the_most_recent_tokens() -> None:
    _, batch, fed = run_policy("streaming", sinks=3, period=1)
    for record, prompt, total in zip(fed.records, batch.prompts, batch.totals, strict=True):
        for q in range(prompt, total):
            visible = [t for t in range(q + 1) if int(record[0, t]) > q]
            # 12 entries (3 sinks, 9 recent tokens) are kept after query q - 1, and the entry of query q is added
            assert visible == ([*range(3), *range(q - 9, q + 1)] if q >= 13 else list(range(q + 1)))


def test_h2o_window_is_half_of_the_budget_by_default() -> None:
    assert make_policy("h2o", budget=13).config.window == 6
    assert make_policy("h2o", budget=13, window=0).config.window == 0


@pytest.mark.parametrize(("of", "left"), [("prompt", [153, 153, 129]), ("seen", [137, 140, 128])])
def test_lined_keeps_a_fraction_of_the_prompt_or_of_the_seen_tokens(of: str, left: list[int]) -> None:
    """LuKA section 4.2: 25 for a prompt of 200 tokens; with `of: seen`, of the tokens outside of the window."""
    schedule = make_policy("lined", compression=8, of=of, window=128).config.schedule
    assert [schedule.left(prompt, seen) for prompt, seen in ((200, 200), (200, 224), (8, 130))] == left


# ---- identity -------------------------------------------------------------------------------------------------------

VARIANTS = [
    *((name, {}) for name in SAMPLED),
    *((name, {"budget": 40, "window": 3, "sinks": 2, "period": 5}) for name in BOUNDED if name != "streaming"),
    ("lined", {"compression": 3, "of": "prompt", "window": 3, "sinks": 2, "period": 5}),
    ("streaming", {"budget": 516, "sinks": 4, "period": 128}),
    ("h2o", {"window": 0}),
    ("snapkv", {"pooling": 3}),
    ("rkv", {"lam": 0.25, "pooling": 9}),
    ("gkv", {"form": "sum", "alpha": 0.5, "redundancy": False, "lam": 0.9, "pooling": 7}),
    ("cake", {"gamma": 3}),
]


@pytest.mark.parametrize(("name", "given_parameters"), VARIANTS)
def test_a_policy_rebuilt_from_its_parameters_equals_the_original(name: str, given_parameters: dict[str, Any]) -> None:
    """Or from a recipe's block or its settings: class, parameters and fingerprint, also through JSON."""
    policy = make_policy(name, **small_parameters(name, **given_parameters))
    parameters = policy.parameters()
    assert {*parameters, "turns"} == set(accepted_parameters(name))  # `turns` is written only if it is not the default
    prefilled = make_policy(name, **parameters, turns="prefilled")
    assert make_policy(json.loads(fingerprint(prefilled))).parameters() == {**parameters, "turns": "prefilled"}
    assert {key: parameters[key] for key in given_parameters} == given_parameters
    named, block = make_policy(name, **parameters), make_policy({"policy": name, **parameters})
    for rebuilt in (named, block, make_policy(policy.config)):
        assert type(rebuilt) is type(policy)
        assert rebuilt.parameters() == parameters
        assert fingerprint(rebuilt) == fingerprint(policy)
    assert make_policy(policy) is policy
    line = fingerprint(policy)
    assert "\n" not in line
    assert json.loads(line) == {"policy": name, **parameters}
    assert json.loads(json.dumps(parameters)) == parameters, "survives a JSON or YAML file"
    assert name in repr(policy)
    assert all(f"{key}={value}" in repr(policy) for key, value in parameters.items())


def test_the_fingerprint_changes_with_every_parameter() -> None:
    base = make_policy("gkv", budget=64)
    for changed in ({"budget": 65}, {"sinks": 1}, {"window": 8}, {"period": 1}, {"form": "sum"}, {"alpha": 0.7}):
        assert fingerprint(make_policy("gkv", **{"budget": 64, **changed})) != fingerprint(base)
    assert fingerprint(make_policy("morphkv", budget=64)) != fingerprint(make_policy("snapkv", budget=64))


def test_a_policy_is_made_from_a_name_or_a_mapping() -> None:
    """Keywords override a mapping, which is not changed. An empty mapping means `full`."""
    for name, cls in CONFIGS.items():
        assert cls.name == name
    assert make_policy({"policy": "streaming", "budget": 20}, budget=30).config.budget == 30
    assert make_policy({}).name == "full"
    block = {"policy": "gkv", "budget": 64}
    make_policy(block)
    assert block == {"policy": "gkv", "budget": 64}, "the caller's mapping is left alone"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gvk", {"budget": 8}, r"unknown cache policy 'gvk' \(did you mean 'gkv'\?\); known: full, streaming, "),
        ("nonsense", {"budget": 8}, r"unknown cache policy 'nonsense'; known: "),
        (None, {}, r"unknown cache policy null"),
        (
            "gkv",
            {"budget": 64, "aplha": 1},
            r"'gkv' has no parameter 'aplha' \(did you mean 'alpha'\?\); it takes turns",
        ),
        ("streaming", {"budget": 64, "window": 8}, r"'streaming' has no parameter 'window'.*takes turns, budget, si"),
        ("streaming", {"budget": 64, "name": "x"}, r"'streaming' has no parameter 'name'; it takes turns, budget, si"),
        ("full", {"budget": 64}, r"'full' has no parameter 'budget'; it takes turns"),
        ("morphkv", {}, r"'morphkv' needs a budget, the number of entries per kv head"),
        *(
            ("morphkv", {"budget": size}, rf"morphkv: budget: expected a mapping or a whole number >= 1, got {shown}")
            for size, shown in ((True, "true"), (0, "0"), (64.0, "64.0"), ("64", "'64'"), (None, "null"))
        ),
        ("tova", {"budget": 8, "sinks": -1}, r"tova: sinks: expected a whole number >= 0, got -1"),
        ("tova", {"budget": 8, "sinks": True}, r"tova: sinks: expected a whole number >= 0, got true"),
        ("tova", {"budget": 8, "window": -2}, r"tova: window: expected a whole number >= 0, got -2"),
        ("h2o", {"budget": 8, "window": False}, r"h2o: window: expected a whole number >= 0 or null, got false"),
        ("tova", {"budget": 8, "period": 0}, r"tova: period: expected a whole number >= 1, got 0"),
        ("tova", {"budget": 8, "period": True}, r"tova: period: expected a whole number >= 1, got true"),
        ("gkv", {"budget": 16}, r"gkv: budget: 16 must exceed window 16 \+ sinks 0; raise it or lower them"),
        ("rkv", {"budget": 18, "sinks": 2}, r"rkv: budget: 18 must exceed window 16 \+ sinks 2"),
        ("streaming", {"budget": 4}, r"streaming: budget: 4 must exceed window 0 \+ sinks 4"),
        ("snapkv", {"budget": 64, "window": 0}, r"snapkv: window: expected a whole number >= 1, got 0"),
        *(
            ("snapkv", {"budget": 64, "pooling": size}, rf"snapkv: pooling: .* >= 1 and odd \(1 is off\), got {shown}")
            for size, shown in ((4, "4"), (True, "true"), (-1, "-1"))
        ),
        ("rkv", {"budget": 64, "lam": 1.5}, r"rkv: lam: expected a number between 0 and 1, got 1.5"),
        ("rkv", {"budget": 64, "lam": True}, r"rkv: lam: expected a number between 0 and 1, got true"),
        ("gkv", {"budget": 64, "alpha": -0.1}, r"gkv: alpha: expected a number between 0 and 1, got -0.1"),
        ("gkv", {"budget": 64, "alpha": float("nan")}, r"gkv: alpha: expected a number between 0 and 1, got nan"),
        ("gkv", {"budget": 64, "form": "maximum"}, r"gkv: form: expected one of max, mean, sum, got 'maximum'"),
        ("gkv", {"budget": 64, "redundancy": 1}, r"gkv: redundancy: expected true or false, got 1"),
        ("cake", {"budget": 64, "gamma": -1}, r"cake: gamma: expected a number >= 0, got -1"),
        ("cake", {"budget": 64, "gamma": True}, r"cake: gamma: expected a number >= 0, got true"),
    ],
)
def test_invalid_parameters_give_a_one_line_error(name: str, parameters: dict[str, Any], message: str) -> None:
    for arguments, keywords in (((name,), parameters), (({"policy": name, **parameters},), {})):
        with pytest.raises(ValueError, match=message) as caught:
            make_policy(*arguments, **keywords)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("gamma", [float("nan"), float("inf")])
def test_a_gamma_that_is_not_finite_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="cake: gamma"):
        make_policy("cake", budget=64, gamma=gamma)


@pytest.mark.parametrize("name", [["gkv"], {"policy": ["gkv"]}])
def test_a_list_in_place_of_a_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="unknown cache policy"):
        make_policy(name, budget=64)
