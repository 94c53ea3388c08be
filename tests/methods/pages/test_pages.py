"""Clustered attention: each query reads summaries of pages, and the tokens of the few pages that it opens. The hf
engine follows the equations, and the trainer replays exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from judging import outcome, padded_gap, trainer_gap
from tiny import model_of, prompts_of
from torch import Tensor

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import ReplayView, make_view
from sparse_rl.errors import UserError
from sparse_rl.methods.pages.cache import PagedCache, _weighed
from sparse_rl.methods.pages.policy import Clustered, choose, random_weights
from sparse_rl.methods.pages.view import PagedView
from sparse_rl.policies import make_policy
from sparse_rl.recipe import load_recipe
from sparse_rl.trace import NEVER, EvictionTrace, TraceError, batch_traces, load_traces, pack_traces, save_traces

LENGTHS = (1, 5, 23, 24, 41, 60, 150)
CACHE = {"policy": "clustered", "page": 4, "window": 8, "sinks": 1, "open_pages": 2}
SAMPLING = SamplingConfig(max_tokens=60, seed=1, ignore_eos=True)
CHANGES: list[dict] = [
    {},
    {"open_pages": 0},
    {"open_pages": 5},
    {"page": 1, "sinks": 0},
    {"page": 7, "window": 0},
    {"page": 16, "window": 20, "sinks": 3},
    {"bias": "none"},
    {"values": "zero"},
    {"compressor": "attention"},
    {"compressor": "random", "page": 3, "open_pages": 1},
]
FOR_EVALUATION: list[dict] = [
    {"softmax": "nested"},
    {"softmax": "nested", "compressor": "attention", "bias": "none"},
    {"threshold": 0.1},
    {"threshold": 0.05, "open_pages": 2},
    {"fraction": 0.5},
    {"fraction": 1.0, "open_pages": 4},
]


@cache
def sampled(name: str, **changed: object) -> tuple:
    """Return (model, rollouts)."""
    model = model_of(name)
    return model, make_engine("hf", model=model, policy={**CACHE, **changed}).generate(
        prompts_of(name, LENGTHS), SAMPLING
    )


# ---- the equations, one entry at a time -----------------------------------------------------------------------------


def clustered_by_loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prompt: int,
    policy: Clustered,
    given_pi: torch.Tensor | None = None,
) -> tuple:
    """Return the outputs [G, S, D] of one kv head, the pages that each query opens, closed_at [P] and the weights pi
    [S], for `query` [G, S, D], `key` and `value` [S, D]; `given_pi` replaces the computed weights."""
    pages, config = policy.pages, policy.config
    group, length, dim = query.shape
    scaling, out, opened, closed_at = dim**-0.5, torch.zeros_like(query), [], list[int]()
    received, pi = torch.zeros(length).double(), torch.zeros(length).double()
    for q in range(length):
        closed = []
        for p in range(length):
            end = pages.sinks + (p + 1) * pages.size
            if end <= length and q >= max(prompt, end + pages.window):
                closed.append(p)
                of_page = slice(end - pages.size, end)
                if p == len(closed_at):
                    closed_at.append(q)
                    mean = torch.ones(pages.size).double() / pages.size
                    computed_pi = received[of_page].softmax(0) if config.compressor == "attention" else mean
                    pi[of_page] = computed_pi if given_pi is None else given_pi[of_page].double()
        inside = {t: p for p in closed for t in range(pages.sinks + p * pages.size, pages.sinks + (p + 1) * pages.size)}
        raw = [t for t in range(q + 1) if t not in inside]
        tokens_of = {p: [t for t, page in inside.items() if page == p] for p in closed}
        entries = [(key[t], value[t], 0.0, None) for t in raw]
        entries += [
            (pi[tokens_of[p]] @ key[tokens_of[p]], pi[tokens_of[p]] @ value[tokens_of[p]] * pages.valued, pages.bias, p)
            for p in closed
        ]
        mass, shares = {p: -math.inf for p in closed}, []
        for g in range(group):
            logits = torch.stack([query[g, q] @ k * scaling + b for k, _, b, _ in entries])
            shares.append(logits.softmax(0))
            for (_, _, _, p), share in zip(entries, logits.log_softmax(0).tolist(), strict=True):
                if p is not None:
                    mass[p] = max(mass[p], share)
        chosen = sorted(closed, key=lambda p: (-mass[p], p))[: pages.most]
        if config.threshold is not None:
            chosen = [p for p in chosen if mass[p] > math.log(config.threshold)]
        if config.fraction is not None:
            chosen = chosen[: math.ceil(config.fraction * len(closed))]
        read = [(k, v, b, t) for (k, v, b, p), t in zip(entries, raw + closed, strict=True) if p not in chosen]
        read += [(key[t], value[t], 0.0, None) for p in chosen for t in tokens_of[p]]
        for g in range(group):
            share = torch.stack([query[g, q] @ k * scaling + b for k, _, b, _ in read]).softmax(0)
            if not pages.joint:  # equation 3
                kept = [a for a, (_, _, _, p) in zip(shares[g], entries, strict=True) if p not in chosen]
                for p in chosen:
                    whole = shares[g][len(raw) + closed.index(p)]
                    kept += list(whole * (key[tokens_of[p]] @ query[g, q] * scaling).softmax(0))
                share = torch.stack(kept)
            out[g, q] = sum(a * v for a, (_, v, _, _) in zip(share, read, strict=True))
            with torch.no_grad():
                for a, t in zip(share[: len(raw)].tolist(), raw, strict=True):
                    received[t] += a / group
        opened.append(set(chosen))
    return out, opened, closed_at, pi.float()


@pytest.mark.parametrize("changed", [*CHANGES, *FOR_EVALUATION], ids=str)
@pytest.mark.few(6)
def test_sampler_and_trainer_follow_the_equations(changed: dict, tally: Callable) -> None:
    """Random tensors go through the engine's cache and the trainer's view: outputs, opened pages, times, weights."""
    policy, generator = make_policy({**CACHE, **changed}), torch.Generator().manual_seed(0)
    prompts, totals, heads, group, dim = [3, 17, 30], [40, 36, 45], 2, 2, 8
    q, k, v = (
        torch.randn(3, n, 45, dim, generator=generator, dtype=torch.float64) for n in (heads * group, heads, heads)
    )
    cache, width = PagedCache(policy), max(prompts)
    cache.begin_prefill(prompts, q.device)
    first = cache.attend(0, *(x[:, :, :width] for x in (q, k, v)), dim**-0.5)
    outputs = [first]
    active = [True] * 3
    while any(active := [n < t for n, t in zip(cache.seen, totals, strict=True)]):
        cache.begin_decode(active, q.device)
        now = [n - 1 for n in cache.seen]
        step = [torch.stack([x[row, :, at : at + 1] for row, at in enumerate(now)]) for x in (q, k, v)]
        outputs.append(cache.attend(0, *step, dim**-0.5))
    for row, (prompt, total) in enumerate(zip(prompts, totals, strict=True)):
        trace = EvictionTrace.recorded(cache.evict_at(row, total + 1), cache.further(row, total + 1))
        padded = [torch.nn.functional.pad(x[row : row + 1, :, :total], (0, 0, 0, 1)) for x in (q, k, v)]
        replayed = None
        if policy.pages.joint:
            replayed = make_view([trace], [0], total + 1, "cpu").attend(0, *padded, dim**-0.5)
        for head in range(heads):
            part = slice(head * group, (head + 1) * group)
            tensors = (q[row, part, :total], k[row, head, :total], v[row, head, :total])
            pi = trace.further["pi"][0, head, :total] if "pi" in trace.further else None
            if policy.config.compressor == "attention":
                assert isinstance(pi, torch.Tensor)
                assert pi.sum() >= 1
                torch.testing.assert_close(clustered_by_loop(*tensors, prompt, policy)[3], pi, atol=1e-6, rtol=0)
            output, opened, closed_at, _ = clustered_by_loop(*tensors, prompt, policy, pi)
            if replayed is not None:
                torch.testing.assert_close(replayed[0, part, :total], output, atol=1e-10, rtol=0)
            for at in range(prompt, total):
                theirs = set(trace.further["opened"][0, head, at].tolist()) - {-1}
                assert theirs == opened[at], (row, head, at)
                sampled_out = outputs[1 + at - prompt][row, part, 0]
                torch.testing.assert_close(sampled_out, output[:, at], atol=1e-10, rtol=0)
            assert trace.further["closed_at"].tolist() == closed_at
            assert bool((trace.evict_at == NEVER).all())
            tally("clustered", total - prompt)


def test_a_random_summary_is_one_token_of_its_page() -> None:
    """It differs between layers, kv heads and pages, and does not depend on the set of pages asked for."""
    weights_of_layer = {layer: random_weights(layer, 3, torch.arange(40), 16) for layer in (0, 1)}
    assert all(
        weights.sum(-1).eq(1).all() and weights.max(-1).values.eq(1).all() for weights in weights_of_layer.values()
    )
    picked = {layer: weights.argmax(-1) for layer, weights in weights_of_layer.items()}
    assert not torch.equal(picked[0], picked[1])
    assert not torch.equal(picked[0][0], picked[0][1])
    assert len(picked[0].unique()) > 10
    assert torch.equal(random_weights(1, 3, torch.tensor([7, 30]), 16), weights_of_layer[1][:, [7, 30]])


def test_the_earlier_of_equal_pages_is_opened() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 1.0, 2.0, float("-inf")]).view(1, 1, 1, 6)
    assert choose(logits, 1, 2)[0, 0].tolist() == [1, 3]
    assert choose(logits, 1, 3)[0, 0].tolist() == [1, 3, 0]
    assert choose(logits, 1, 6)[0, 0].tolist() == [1, 3, 0, 2, -1, -1]


@pytest.mark.parametrize("changed", [*CHANGES, {"fraction": 0.5}, {"fraction": 0.3, "open_pages": 4}], ids=str)
def test_the_reported_number_of_read_entries_equals_that_of_the_attention(
    changed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of unmasked logits in each step."""
    policy, generator = make_policy({**CACHE, **changed}), torch.Generator().manual_seed(0)
    read: list[int] = []

    def counting(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        read.append(int(sum((logits > -torch.inf).sum(-1) for logits, _ in parts).max()))
        return _weighed(parts)

    for prompt in (1, 10, 50):
        cache = PagedCache(policy)
        cache.begin_prefill([prompt], torch.device("cpu"))
        q, k, v = (torch.randn(1, n, prompt, 4, generator=generator) for n in (2, 1, 1))
        cache.attend(0, q, k, v, 0.5)
        read.clear()
        with monkeypatch.context() as patch:
            patch.setattr("sparse_rl.methods.pages.cache._weighed", counting)
            for fed in range(prompt + 1, prompt + 40):
                cache.begin_decode([True], torch.device("cpu"))
                cache.attend(0, *(torch.randn(1, n, 1, 4, generator=generator) for n in (2, 1, 1)), 0.5)
                assert policy.most_read(prompt, fed) == max(read), (prompt, fed)


# ---- replay ---------------------------------------------------------------------------------------------------------


# `make test` runs every setting on the trained model and two settings on each other model; all pairs are slow.
MATRIX = [
    pytest.param(
        name, changed, id=f"{name}-{changed}", marks=[] if name == "quickstart" or i in few else pytest.mark.slow
    )
    for name, few in {
        "quickstart": (),
        "qwen2": (0, 4),
        "qwen3": (0, 5),
        "llama": (1, 6),
        "stories260K": (0, 3),
    }.items()
    for i, changed in enumerate(CHANGES)
]


@pytest.mark.parametrize(("name", "changed"), MATRIX)
@pytest.mark.few(2)
def test_replay_is_exact(name: str, changed: dict, tally: Callable) -> None:
    """In one batch and in batches of 3."""
    model, rollouts = sampled(name, **changed)
    replay_gap = trainer_gap(model, rollouts)
    tally("clustered", gap=replay_gap)
    assert replay_gap <= 1e-5
    assert trainer_gap(model, rollouts, batch_size=3) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("changed", [CHANGES[i] for i in (0, 1, 2, 5, 9)], ids=str)
def test_replay_of_long_stories_is_exact(changed: dict, threads: int) -> None:
    """500 tokens, near the trained model's maximum length. Control: pages that close one query late."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = model_of("stories260K")
        engine = make_engine("hf", model=model, policy={**CACHE, **changed})
        rollouts = engine.generate([[1]], SamplingConfig(500, n=6, seed=1, ignore_eos=True))
        replay_gap = trainer_gap(model, rollouts, batch_size=3)
        wrong_gap = trainer_gap(model, closing_late(rollouts))
    finally:
        torch.set_num_threads(before)
    assert replay_gap <= 1e-5 < 1e-2 <= wrong_gap


def with_opened_pages(rollouts: list[Rollout], change: Callable) -> list[Rollout]:
    def changed(trace: EvictionTrace) -> EvictionTrace:
        further = {**trace.further, "opened": change(trace.further["opened"])}
        return EvictionTrace(trace.evict_at, further, validate=False)

    return [replace(r, trace=changed(r.trace)) for r in rollouts]


def closing_late(rollouts: list[Rollout]) -> list[Rollout]:
    def late(trace: EvictionTrace) -> EvictionTrace:
        closed_at = trace.further["closed_at"] + 1
        closed = torch.searchsorted(closed_at, torch.arange(len(trace)), right=True)[:, None]
        opened = trace.further["opened"].where(trace.further["opened"] < closed, -1).to(torch.int16)
        return EvictionTrace(
            trace.evict_at, {**trace.further, "closed_at": closed_at, "opened": opened}, validate=False
        )

    return [replace(r, trace=late(r.trace)) for r in rollouts]


@pytest.mark.parametrize("name", ["quickstart", pytest.param("stories260K", marks=pytest.mark.slow)])
def test_control_wrong_opened_pages_give_a_large_gap(name: str) -> None:
    model, rollouts = sampled(name)
    wrong_rollouts = {
        "one query late": with_opened_pages(rollouts, lambda x: x.roll(1, dims=2)),
        "heads swapped": with_opened_pages(rollouts, lambda x: x.roll(1, dims=1)),
        "nothing opened": with_opened_pages(rollouts, lambda x: torch.full_like(x, -1)),
        "one page missing": with_opened_pages(rollouts, lambda x: x.index_fill(3, torch.tensor([0]), -1)),
    }
    for control, traces in wrong_rollouts.items():
        assert trainer_gap(model, traces) >= 1, control
    assert trainer_gap(model, closing_late(rollouts)) >= 1e-2


def test_pages_opened_after_noise_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of 1e-3 on the choosing logits, as in half precision, opens other pages. Control: those without."""
    generator = torch.Generator().manual_seed(0)

    def noisy(logits: torch.Tensor, *how: object) -> torch.Tensor:
        return choose(logits + 1e-3 * torch.randn(logits.shape, generator=generator), *how)

    model, prompts = model_of("quickstart"), prompts_of("quickstart", LENGTHS)
    engine = make_engine("hf", model=model, policy=CACHE)
    clean = engine.generate(prompts, SAMPLING)
    monkeypatch.setattr("sparse_rl.methods.pages.cache.choose", noisy)
    rollouts = engine.simulate(prompts, [r.completion_ids for r in clean])
    differences = [a.trace.further["opened"] != b.trace.further["opened"] for a, b in zip(clean, rollouts, strict=True)]
    assert sum(int(x.sum()) for x in differences) > 0
    assert trainer_gap(model, rollouts) <= 1e-5
    with_clean_traces = [replace(r, trace=c.trace) for r, c in zip(rollouts, clean, strict=True)]
    # control
    assert trainer_gap(model, with_clean_traces) > 1e-3


@pytest.mark.parametrize("name", ["quickstart", pytest.param("stories260K", marks=pytest.mark.slow)])
def test_opening_all_pages_equals_full_attention(name: str) -> None:
    """Control: under the nested softmax (equation 3) opened pages keep their summaries' masses."""
    model, rollouts = sampled(name, open_pages=100)
    full = make_engine("hf", model=model, policy="full").generate(prompts_of(name, LENGTHS), SAMPLING)
    for ours, theirs in zip(rollouts, full, strict=True):
        assert ours.completion_ids == theirs.completion_ids
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-5, rtol=0)
    if name == "quickstart":
        _, nested = sampled(name, open_pages=100, softmax="nested")
        assert any(ours.completion_ids != theirs.completion_ids for ours, theirs in zip(nested, full, strict=True))


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    model, rollouts = sampled("quickstart")
    engine = make_engine("hf", model=model, policy=CACHE)
    for row in (0, 3, 6):
        alone = engine.generate(prompts_of("quickstart", LENGTHS)[row : row + 1], SAMPLING)
        assert outcome(alone) == outcome(rollouts[row : row + 1])


@pytest.mark.parametrize("side", ["left", "both"])
def test_replay_does_not_depend_on_padding(side: str) -> None:
    model, rollouts = sampled("qwen3")
    assert padded_gap(model, rollouts, side) <= 1e-5


def fed_whole(
    policy: Clustered, pages: list[list[int]], closed_at: list[int], pi: torch.Tensor | None
) -> EvictionTrace:
    """Return the trace of one layer and kv head whose last token is a query too, which a sampler would not feed."""
    total = len(pages)
    further = {
        "paged_with": policy.pages.settings(),
        "closed_at": torch.tensor(closed_at, dtype=torch.int32),
        "opened": torch.tensor(pages, dtype=torch.int16).view(1, 1, total, -1),
    }
    further |= {} if pi is None else {"pi": pi[None, None]}
    return EvictionTrace(torch.full((1, 1, total), NEVER, dtype=torch.int32), further, validate=False)


@pytest.mark.parametrize("changed", CHANGES, ids=str)
@pytest.mark.few(4)
def test_gradients_equal_the_equations(changed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, through the summaries, not through the choice of pages."""
    monkeypatch.setattr("sparse_rl.methods.pages.view.CHUNK", 7)
    policy, generator = make_policy({**CACHE, **changed}), torch.Generator().manual_seed(1)
    prompt, total, group, dim = 9, 34, 2, 8
    inputs = [torch.randn(1, n, total, dim, generator=generator, dtype=torch.float64) for n in (group, 1, 1)]
    weights = torch.randn(1, group, total, dim, generator=generator, dtype=torch.float64)
    results = []
    opened: list[set[int]] = []
    closed_at: list[int] = []
    picked = random_weights(0, 1, torch.arange(total // policy.pages.size), policy.pages.size).flatten()
    picked = torch.nn.functional.pad(picked, (policy.pages.sinks, 0))
    q, k, v = inputs
    attention_pi = clustered_by_loop(q[0], k[0, 0], v[0, 0], prompt, policy)[3]
    pi = {"mean": None, "random": picked, "attention": attention_pi}[policy.config.compressor]
    for method in ("equations", "view"):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        if method == "equations":
            out, opened, closed_at, _ = clustered_by_loop(q[0], k[0, 0], v[0, 0], prompt, policy, pi)
            out = out[None]
        else:
            pages = [(sorted(entry) + [-1] * 5)[: policy.pages.most] for entry in opened]
            trace = fed_whole(policy, pages, closed_at, pi)
            out = make_view([trace], [0], total, "cpu").attend(0, q, k, v, dim**-0.5)
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def masked_attention(view: PagedView, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend as `PagedView.attend` does, but under one mask over all tokens and all summaries of a row."""
    opened, (page_keys, page_values) = view.decided(layer, key, value)
    batch, heads, width, _ = key.shape
    now, count = torch.arange(width), view.closes.shape[1]
    behind = now - view.start[:, None] - view.pages.sinks
    page_of = behind.div(view.pages.size, rounding_mode="floor")
    seen = ((now <= now[:, None]) & (now[:, None] < view.until[:, None]))[:, None]
    is_open = torch.zeros(batch, heads, width, count + 1, dtype=torch.bool)
    is_open = is_open.scatter(3, torch.where(opened < 0, count, opened), True)
    is_open[..., count] = False
    place = torch.where((behind >= 0) & (page_of < count), page_of, count)[:, None, None].expand(-1, heads, width, -1)
    seen = seen | is_open.gather(3, place) | torch.eye(width, dtype=torch.bool)
    summaries = (view.closes[:, None, None] <= now[:, None]) & ~is_open[..., :count]
    biases = torch.cat(
        [
            torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, float("-inf")),
            torch.full(summaries.shape, view.pages.bias, dtype=query.dtype).masked_fill(~summaries, float("-inf")),
        ],
        dim=-1,
    )
    keys, values = torch.cat([key, page_keys], dim=2), torch.cat([value, page_values], dim=2)
    logits = query.unflatten(1, (heads, -1)) @ keys[:, :, None].mT * scaling + biases[:, :, None]
    return (logits.softmax(-1) @ values[:, :, None]).flatten(1, 2)


@pytest.mark.parametrize("chunk", [1, 16, 128])
@pytest.mark.few(1)
def test_gathered_attention_equals_masked_attention(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, with padding on both sides, and for any chunk of queries."""
    monkeypatch.setattr("sparse_rl.methods.pages.view.CHUNK", chunk)
    _, rollouts = sampled("qwen2")
    width, generator = 230, torch.Generator().manual_seed(0)
    starts = [(7 * row) % (width - len(r.trace)) for row, r in enumerate(rollouts)]
    traces, inputs = [r.trace for r in rollouts], []
    kv_heads = traces[0].kv_heads
    for n in (2 * kv_heads, kv_heads, kv_heads):
        inputs.append(torch.randn(len(traces), n, width, 8, generator=generator, dtype=torch.float64))
    results = []
    view: Any = make_view(traces, starts, width, "cpu").of_policy
    for attend in (view.attend, partial(masked_attention, view)):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = attend(1, q, k, v, 0.3)
        column = torch.arange(width)
        rows = zip(starts, traces, strict=True)
        real = torch.stack([(column >= start) & (column < start + len(trace)) for start, trace in rows])
        kept = out * real[:, None, :, None]
        results.append([kept.detach(), *torch.autograd.grad(kept.square().sum(), (q, k, v))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


# ---- the record -----------------------------------------------------------------------------------------------------


def test_page_records_survive_a_file_and_wrong_records_are_refused(tmp_path) -> None:
    """ReplayView, which would ignore the pages, refuses them, and so does packing."""
    _, rollouts = sampled("qwen3")
    traces = [r.trace for r in rollouts]
    save_traces(tmp_path / "t.safetensors", traces)
    for ours, theirs in zip(load_traces(tmp_path / "t.safetensors"), traces, strict=True):
        assert all(torch.equal(ours.sections[name], theirs.sections[name]) for name in theirs.sections)
    trace = traces[3]
    assert isinstance(make_view([trace], [0], len(trace), "cpu").of_policy, PagedView)
    with pytest.raises(TraceError, match="ReplayView cannot replay the section 'paged_with'"):
        ReplayView(batch_traces([trace], [0], len(trace)), "cpu")
    with pytest.raises(TraceError, match="cannot be packed"):
        pack_traces([trace, trace])
    opened, paged_with = trace.further["opened"], trace.further["paged_with"]
    for changed, message in (
        ({"opened": torch.full_like(opened, 9999)}, r"opened\[0, 0, 0\] is page 9999, but only 0 pages"),
        ({"opened": opened.long()}, "opened must be int16"),
        ({"opened": opened[:, :, 1:]}, "tokens, but the trace has"),
        ({"paged_with": paged_with * 0}, "is not a valid division of tokens into pages"),
    ):
        with pytest.raises(TraceError, match=message):
            EvictionTrace(trace.evict_at, {**trace.further, **changed})
    _, with_other_window = sampled("qwen3", window=9)
    with pytest.raises(TraceError, match="settings differ"):
        batch_traces([trace, with_other_window[3].trace], [0, 0], 300)


def test_weights_are_recorded_if_and_only_if_summaries_are_weighted() -> None:
    _, plain = sampled("qwen3")
    _, weighed = sampled("qwen3", compressor="attention")
    plain, weighed = plain[3].trace, weighed[3].trace
    lacking = {name: values for name, values in weighed.further.items() if name != "pi"}
    for evict_at, further in (
        (weighed.evict_at, lacking),
        (plain.evict_at, {**plain.further, "pi": torch.zeros(plain.shape)}),
    ):
        with pytest.raises(TraceError, match="pi must be present if, and only if, summaries are not plain means"):
            EvictionTrace(evict_at, further)
    pi = sampled("qwen3", compressor="random")[1][-1].trace.further["pi"]
    assert not torch.equal(pi[0], pi[1])  # random summaries differ between layers
    with pytest.raises(TraceError, match="pi has a weight that is not between 0 and 1"):
        EvictionTrace(weighed.evict_at, {**weighed.further, "pi": weighed.further["pi"] + 1})


@pytest.mark.parametrize("name", ["quickstart", pytest.param("stories260K", marks=pytest.mark.slow)])
def test_replay_uses_the_recorded_weights(name: str) -> None:
    """Control: the weights of the other kv head."""
    model, rollouts = sampled(name, compressor="attention")

    def heads_swapped(trace: EvictionTrace) -> EvictionTrace:
        return EvictionTrace(trace.evict_at, {**trace.further, "pi": trace.further["pi"].roll(1, dims=1)})

    assert trainer_gap(model, rollouts) <= 1e-5
    wrong_rollouts = [replace(r, trace=heads_swapped(r.trace)) for r in rollouts]
    assert trainer_gap(model, wrong_rollouts) > 1e-2


def test_the_nested_softmax_can_be_sampled_but_not_replayed() -> None:
    model, rollouts = sampled("qwen2", softmax="nested")
    with pytest.raises(TraceError, match="sampled under softmax: nested, which is not replayed; use joint"):
        replay_logprobs(model, rollouts)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"threshold": 0.1, "fraction": 0.5}, "fraction: .*give a threshold or a fraction, not both"),
        ({"threshold": 2.0}, "threshold: expected a number between 0 and 1"),
        ({"compressor": "median"}, "compressor: expected one of mean, attention, random"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_policy({**CACHE, **changed})


def test_the_number_of_opened_pages_is_a_fraction_rounded_up() -> None:
    policy = make_policy("clustered", fraction=0.07, open_pages=90)
    assert [policy.most_opened(closed) for closed in (0, 1, 14, 15, 100, 101, 2000)] == [0, 1, 1, 2, 7, 8, 90]


def test_with_a_threshold_or_fraction_at_most_16_pages_are_opened_by_default() -> None:
    block = {"policy": "clustered"}
    assert make_policy(block).config.open_pages == 3
    assert make_policy({**block, "threshold": 0.05}).config.open_pages == 16
    assert make_policy({**block, "fraction": 0.5, "open_pages": 90}).config.open_pages == 90


@pytest.mark.parametrize(("key", "value"), [("threshold", 0.1), ("fraction", 0.1), ("softmax", "nested")])
def test_settings_for_evaluation_are_refused_in_training(key: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("quickstart/grpo", [f"cache={json.dumps({**CACHE, key: value})}"])
    assert caught.value.key == f"cache.{key}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compressor", ["mean", "attention"])
@pytest.mark.few(1)
def test_gradients_equal_finite_differences(compressor: str) -> None:
    policy, generator = make_policy({**CACHE, "compressor": compressor}), torch.Generator().manual_seed(2)
    prompt, total, dim = 5, 26, 4
    inputs = [torch.randn(1, n, total, dim, generator=generator, dtype=torch.float64) for n in (2, 1, 1)]
    _, opened, closed_at, pi = clustered_by_loop(inputs[0][0], inputs[1][0, 0], inputs[2][0, 0], prompt, policy)
    pages = [(sorted(item) + [-1] * 5)[: policy.pages.most] for item in opened]
    trace = fed_whole(policy, pages, closed_at, None if policy.pages.uniform else pi)
    view = make_view([trace], [0], total, "cpu")
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: view.attend(0, *x, dim**-0.5), leaves, atol=1e-6, rtol=1e-6)


def test_more_pages_than_the_record_can_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_rl.methods.pages.cache.MOST_PAGES", 5)
    engine = make_engine("hf", model=model_of("qwen2"), policy=CACHE)
    with pytest.raises(UserError, match=r"more than 5 pages; use larger pages"):
        engine.generate([[1, 2, 3]], SAMPLING)


def test_vllm_refuses_the_policy_clustered() -> None:
    with pytest.raises(UserError, match="hf"):
        make_engine("vllm", model="nowhere", policy=CACHE)


def test_a_row_that_has_ended_does_not_make_the_others_read_more() -> None:
    """None of its pages close. The row that decodes reads sinks, window and less than a page besides summaries."""
    policy = make_policy({"policy": "clustered", "page": 4, "window": 8, "sinks": 2, "open_pages": 1})
    for active in ([True, False], [True, True]):
        cache, generator = PagedCache(policy), torch.Generator().manual_seed(0)

        def new(count: int, heads: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(2, heads, count, 4, generator=generator)

        cache.begin_prefill([100, 100], torch.device("cpu"))
        cache.attend(0, new(100, 2), new(100, 1), new(100, 1), 0.5)
        for _ in range(5):
            cache.begin_decode(active, torch.device("cpu"))
            assert cache._tokens.shape[1] <= 2 + 8 + 4
            out = cache.attend(0, new(1, 2), new(1, 1), new(1, 1), 0.5)
            assert bool(out.isfinite().all())
