"""A long context is read and compacted once, and completions continue from its kept entries (hf engine). The tests
cover which entries are kept, what continuations see, budgets of heads, reading in pieces, and refusals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from continued import check_continuation, engine_of, slow_logprobs
from judging import gap, trainer_gap
from matching_reference import naive_allocation
from tiny import model_of, prompts_of

from rollout import SamplingConfig
from rollout.context import Context, ContextCache, PromptCacheConfig
from rollout.context.budgets import BASE, RATIOS, STEPS, allocate, counts, load, save, sensitivity
from rollout.context.reader import ContextPrompts
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.errors import UserError
from sparse_rl.trace import TraceError

SAMPLING = SamplingConfig(max_tokens=20, seed=1, ignore_eos=True)
MODELS = ["quickstart", "stories260K", "qwen3", "llama"]


@pytest.mark.parametrize("changed", [{}, {"select": "omp"}, {"policy": "evict"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(2)
def test_continuations_attend_only_to_kept_entries(name: str, changed: dict) -> None:
    """First 2, last 3 and 30 % of the other tokens. Sampled and simulated log-probs are those of a slow reference."""
    engine, (tokens, *questions) = engine_of(name), prompts_of(name, [60, 1, 7])
    context = engine.compact(tokens, PromptCacheConfig(ratio=0.3, first=2, last=3, **changed))
    assert all(layer.keys.shape[2] == 2 + 3 + round(0.3 * 55) for layer in context.layers)
    for r, question in zip(engine.generate(questions, SAMPLING, context), questions, strict=True):
        assert r.prompt_ids == [*tokens, *question]
        assert len(r.trace) == len(r.prompt_ids) + 20
        assert gap([slow_logprobs(model_of(name), context, question, r.completion_ids)], [r]) <= 1e-5
        (simulated,) = engine.simulate([question], [r.completion_ids], context=context)
        assert gap([torch.tensor(simulated.model_logprobs)], [r]) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_continuations_after_fits_to_another_text_are_not_replayed(name: str) -> None:
    """The trace has neither this text nor biases and values. Control: after plain evictions the gap is at most 1e-5."""
    engine, (tokens, *questions) = engine_of(name), prompts_of(name, [60, 1, 7])
    rollouts = engine.generate(
        questions, SAMPLING, engine.compact(tokens, PromptCacheConfig(ratio=0.3, policy="evict", first=2))
    )
    assert trainer_gap(model_of(name), rollouts) <= 1e-5
    fitted = engine.generate(questions, SAMPLING, engine.compact(tokens, PromptCacheConfig(ratio=0.3, first=2)))
    with pytest.raises(TraceError, match="no view replays traces with the sections evict_at, compacted_at"):
        replay_logprobs(model_of(name), fitted)


def test_a_context_without_evictions_equals_a_full_cache() -> None:
    engine, (tokens, question) = engine_of("quickstart"), prompts_of("quickstart", [60, 7])
    (plain,) = engine.generate([[*tokens, *question]], SAMPLING)
    context = engine.compact(tokens, PromptCacheConfig(ratio=1.0, policy="evict"))
    (ours,) = engine.simulate([question], [plain.completion_ids], context=context)
    assert gap([torch.tensor(ours.model_logprobs)], [plain]) <= 1e-5


def test_continuations_of_a_shared_context_equal_separate_continuations() -> None:
    """Five completions of different lengths; the context is compacted again for each."""
    engine, (tokens, *questions) = engine_of("quickstart"), prompts_of("quickstart", [60, 1, 7, 4, 12, 7])
    config = PromptCacheConfig(ratio=0.2)
    context = engine.compact(tokens, config)
    ragged = [list(range(3, 3 + n)) for n in (4, 20, 9, 2, 13)]
    together = engine.simulate(questions, ragged, context=context)
    for question, completion, theirs in zip(questions, ragged, together, strict=True):
        (alone,) = engine.simulate([question], [completion], context=engine.compact(tokens, config))
        assert gap([torch.tensor(alone.model_logprobs)], [theirs]) <= 1e-5


def test_a_compacted_context_holds_only_its_kept_entries_in_memory() -> None:
    """Of 201 tokens, the first token and 10 % of the others are kept: 21 entries."""
    engine, (tokens,) = engine_of("qwen2"), prompts_of("qwen2", [201])
    whole = engine.compact(tokens, PromptCacheConfig(ratio=1.0, policy="evict")).nbytes
    small = engine.compact(tokens, PromptCacheConfig(ratio=0.1)).nbytes
    assert small * 201 == whole * 21


@pytest.mark.parametrize("aggregate", ["rms", "mean", "max"])
def test_entries_with_most_attention_are_kept(aggregate: str) -> None:
    """For each `aggregate` over reference queries, with and without fits. Control: `fit: paper` has other values."""
    engine, (tokens,) = engine_of("stories260K"), prompts_of("stories260K", [60])
    config = PromptCacheConfig(ratio=0.2, policy="evict", aggregate=aggregate, first=2, last=1)
    studied = engine.study(tokens, config)
    evicted, matched = studied.compacted(config), studied.compacted(replace(config, policy="am"))
    for layer, (entries, queries) in enumerate(zip(studied.whole.layers, studied.queries, strict=True)):
        shares = (queries.double() @ entries.keys.double().mT * 8**-0.5)[..., 2:-1].softmax(-1)
        scores = {"rms": shares.square().mean(2), "mean": shares.mean(2), "max": shares.amax(2)}[aggregate]
        best = scores.topk(round(0.2 * 57), dim=-1).indices.sort(-1).values + 2
        for context in (evicted, matched):
            assert torch.equal(context.layers[layer].positions[:, :, 3:], best)  # after the uncompacted part
    paper = studied.compacted(replace(config, policy="am", fit="paper"))
    assert not torch.equal(paper.layers[0].values, matched.layers[0].values)


def test_many_reference_queries_are_subsampled_reproducibly() -> None:
    """Control: with all queries the fitted values differ."""
    engine, (tokens,) = engine_of("qwen2"), prompts_of("qwen2", [60])
    few = engine.compact(tokens, PromptCacheConfig(ratio=0.2, most_queries=7))
    many = engine.compact(tokens, PromptCacheConfig(ratio=0.2))
    repeated = engine.compact(tokens, PromptCacheConfig(ratio=0.2, most_queries=7))
    assert torch.equal(few.layers[0].values, repeated.layers[0].values)
    assert not torch.equal(few.layers[0].values, many.layers[0].values)


# ---- budgets of heads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["am", "evict"])
def test_heads_keep_the_number_of_entries_assigned_to_them(policy: str) -> None:
    """No query attends to the padding of a shorter head. Equal counts give the same values as a ratio."""
    engine, (tokens, question) = engine_of("stories260K"), prompts_of("stories260K", [60, 5])
    config = PromptCacheConfig(policy=policy, first=2)
    sizes = [[1 + layer + 3 * head for head in range(4)] for layer in range(5)]
    context = engine.study(tokens, config).compacted(config, sizes)
    kept = (context.evict_at() > 60).sum(-1) - 2
    assert kept.tolist() == sizes
    r = check_continuation(engine, context, question)
    if policy == "evict":
        assert trainer_gap(model_of("stories260K"), [r]) <= 1e-5
    even = engine.study(tokens, config).compacted(config, [[6] * 4] * 5)
    assert torch.equal(even.layers[3].values, engine.compact(tokens, replace(config, ratio=6 / 58)).layers[3].values)


def test_heads_that_gain_more_get_more_entries() -> None:
    """One loss falls steeply and its head gets the most; one does not fall, and gets the least; equal curves, equal
    shares."""
    ratios = (0.01, 0.1, 1.0)
    curves = torch.tensor([[[1.0, 0.5, 0.0], [0.1, 0.1, 0.1]], [[0.2, 0.1, 0.0], [0.2, 0.1, 0.0]]]).double()
    shares = allocate(curves, ratios, 0.1)
    assert float(shares.mean()) == pytest.approx(0.1)
    assert shares[0, 0] > 2 * shares[1, 0]
    assert shares[1, 0] == pytest.approx(float(shares[1, 1]), abs=2e-3)
    assert shares[0, 1] <= 0.0105
    flat = allocate(torch.zeros(2, 2, 3).double(), ratios, 0.1)
    assert torch.equal(flat, torch.full((2, 2), 0.1, dtype=torch.float64))
    with pytest.raises(UserError, match=r"2.0 is not between 0.01 and 1.0"):
        allocate(curves, ratios, 2.0)
    with pytest.raises(UserError, match="0 leaves no entries to distribute"):
        allocate(torch.zeros(1, 2, len(RATIOS)), RATIOS, 0)


def curve_of(ratios: Sequence[float], losses: Sequence[float]) -> Callable[[float], float]:
    """Return the loss curve J(ratio), interpolated between the measured ratios as `allocate` documents."""

    def at(ratio: float) -> float:
        return math.log(ratio) + 1 if ratio >= ratios[1] else ratio / ratios[1] + math.log(ratios[1])

    def loss(ratio: float) -> float:
        right = next((n for n in range(1, len(ratios)) if ratio <= ratios[n]), len(ratios) - 1)
        part = (at(ratio) - at(ratios[right - 1])) / (at(ratios[right]) - at(ratios[right - 1]))
        return losses[right - 1] + part * (losses[right] - losses[right - 1])

    return loss


def compare_with_algorithm_4(curves: torch.Tensor, ratio: float) -> tuple[list[float], int]:
    """Check `allocate` against the plain algorithm. Return its shares and the number of moves of entries."""
    result = allocate(curves, RATIOS, ratio)
    shares, moves = naive_allocation([curve_of(RATIOS, curve) for curve in curves.flatten(0, 1).tolist()], ratio, STEPS)
    assert result.flatten().tolist() == pytest.approx(shares, abs=1e-12)
    assert float(result.mean()) == pytest.approx(ratio)
    assert 0 <= float(result.min()) <= float(result.max()) <= 1 + 1e-9
    return shares, moves


@pytest.mark.parametrize("ratio", [0.02, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("convex", [True, False])
def test_shares_equal_algorithm_4(convex: bool, ratio: float) -> None:
    """For convex curves and others. At ratio 1 all entries are kept, and none is moved between heads."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        losses = torch.rand(2, 3, len(RATIOS), generator=generator, dtype=torch.float64)
        if convex:
            losses = losses[..., :1] * (1 - torch.tensor(RATIOS)) ** (1 + 50 * losses[..., 1:2])
        _, moves = compare_with_algorithm_4(losses, ratio)
        assert moves == 0 if ratio == 1 else moves > STEPS / 2


def test_shares_equal_algorithm_4_if_one_head_is_the_best_to_gain_and_to_lose_entries() -> None:
    """It ends with more than twice its entries; another head ends with almost none."""
    curves = torch.zeros(1, 3, len(RATIOS), dtype=torch.float64)
    curves[0, 0] = torch.tensor([0.0, 0.2, 0.6, 1.0, 0.6, 0.4, 0.2, 0.0])
    curves[0, 1:] = torch.tensor([0.03, 0.02, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0])
    shares, moves = compare_with_algorithm_4(curves, RATIOS[3])
    assert moves >= STEPS
    assert shares[0] > 2 * RATIOS[3]
    assert min(shares) < RATIOS[1]


def test_shares_of_measured_curves_equal_algorithm_4() -> None:
    """Some head ends below 0.01, the smallest measured ratio above 0."""
    engine, (tokens, question) = engine_of("stories260K"), prompts_of("stories260K", [60, 5])
    config = PromptCacheConfig(policy="evict")
    studied = engine.study(tokens, config)

    @torch.no_grad()
    def next_logprobs(context: Context) -> torch.Tensor:
        hidden = engine.prefill([question], context).hidden
        return engine.model.get_output_embeddings()(hidden)[0].double().log_softmax(-1)

    full = next_logprobs(studied.whole)
    curves = sensitivity([studied], config, lambda _, context: float(full.exp() @ (full - next_logprobs(context))))
    assert float(curves.min()) > 0
    assert not torch.equal(curves, curves.sort(-1, descending=True).values)
    shares, moves = compare_with_algorithm_4(curves, BASE)
    assert moves > STEPS
    assert min(shares) < RATIOS[1]


def test_a_curve_is_the_loss_with_one_head_changed() -> None:
    """In each evaluation one head keeps 1 or 25 of 50 entries, the others the 5 of the base ratio."""
    engine, (tokens,) = engine_of("quickstart"), prompts_of("quickstart", [50])
    studied = engine.study(tokens, PromptCacheConfig(first=0))
    recorded: list[list[list[int]]] = []

    def loss(index: int, context: Context) -> float:
        recorded.append((context.evict_at() > 50).sum(-1).tolist())
        return float(len(recorded))

    layers, heads = len(studied.whole.layers), studied.whole.layers[0].keys.shape[1]
    curves = sensitivity([studied], PromptCacheConfig(first=0), loss, ratios=(0.02, 0.5), base=0.1)
    assert curves.shape == (layers, heads, 2)
    assert curves.flatten().tolist() == list(range(1, 2 * layers * heads + 1))
    for number, kept in enumerate(recorded):
        layer, head, ratio = number // (2 * heads), number // 2 % heads, number % 2
        assert kept[layer][head] == (1, 25)[ratio]
        assert sum(map(sum, kept)) == (layers * heads - 1) * 5 + (1, 25)[ratio]


def test_saved_head_budgets_load_unchanged_and_wrong_files_are_refused(tmp_path: Path) -> None:
    """Shares are normalised to mean 1; `counts` gives each head at least 1 entry."""
    shares = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.05, 0.15]]).double()
    save(tmp_path / "b.json", shares)
    torch.testing.assert_close(load(tmp_path / "b.json", range(2), 3), shares / 0.15)
    config = PromptCacheConfig(first=1, last=1)
    assert counts(shares, 0.1, 102, config) == [[7, 13, 20], [7, 3, 10]]
    assert counts(shares, 0.001, 102, config) == [[1, 1, 1], [1, 1, 1]]
    save(tmp_path / "zero.json", torch.tensor([[0.0, 0.1]]).double())
    assert counts(load(tmp_path / "zero.json", range(1), 2), 0.1, 102, config) == [[1, 20]]
    for wrong_shares in ([[-0.1, 0.3]], [[0.0, 0.0]]):
        (tmp_path / "wrong.json").write_text(json.dumps({"shares": wrong_shares}))
        with pytest.raises(UserError, match="a head budget below 0, or no head budget above 0"):
            load(tmp_path / "wrong.json", range(1), 2)
    (tmp_path / "no.json").write_text("[]")
    for file, message in (
        ("absent", "there is no file"),
        ("no.json", "it is not a mapping"),
        ("b.json", r"\[2, 3\], but the model"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load(tmp_path / file, range(2), 2)
        assert "\n" not in str(caught.value)


def test_invalid_compactions_are_refused() -> None:
    engine = engine_of("qwen2")
    with pytest.raises(UserError, match=r"the context has 3 tokens, but first \+ last is 5"):
        engine.compact([1, 2, 3], PromptCacheConfig(first=5))
    with pytest.raises(UserError, match="self_study needs prompts"):
        engine.compact([1, 2, 3, 4], PromptCacheConfig(queries=["self_study"]))
    with pytest.raises(UserError, match="the context has 0 tokens"):
        engine.compact([], PromptCacheConfig())
    context = engine.compact([1, 2, 3, 4], PromptCacheConfig())
    with pytest.raises(UserError, match=r"another model: layers, kv heads and head size are \(2, 2, \d+\), not \("):
        engine_of("stories260K").generate([[5]], SAMPLING, context)


# ---- in pieces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(60,), (3, 61, 8, 24), (1, 9)], ids=str)
@pytest.mark.parametrize("name", ["stories260K", "qwen3"])
@pytest.mark.few(2)
def test_reading_in_pieces_equals_reading_in_one_pass(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states, keys, values and queries, for rows of different lengths, with and without a context."""
    engine, (tokens, *texts) = engine_of(name), prompts_of(name, [60, *lengths])
    for context in (None, engine.compact(tokens, PromptCacheConfig(ratio=0.3, queries=["context"]))):
        caches = []
        for piece, at_once in ((1024, 2**26), (8, 2**26), (8, 2000)):
            monkeypatch.setattr("rollout.context.cache.ContextCache.piece", piece)
            monkeypatch.setattr("rollout.context.cache.MOST_LOGITS", at_once)
            cache = ContextCache(context, captures=True)
            caches.append((cache, engine._read(texts, cache).hidden))
        (whole, hidden), *others = caches
        for cache, theirs in others:
            torch.testing.assert_close(theirs, hidden, atol=1e-5, rtol=1e-5)
            assert cache.lengths == whole.lengths == list(lengths)
            for layer, pair in whole.own.items():
                for row, n in enumerate(lengths):
                    for a, b in zip(
                        (*pair, whole.captured(layer)), (*cache.own[layer], cache.captured(layer)), strict=True
                    ):
                        torch.testing.assert_close(a[row, :, :n], b[row, :, :n], atol=1e-5, rtol=1e-5)


def test_a_context_compacted_in_pieces_equals_a_context_compacted_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if prompts end in different pieces. No forward pass has more tokens than a piece."""
    engine, (tokens, question, *questions) = engine_of("stories260K"), prompts_of("stories260K", [60, 5, 30, 2, 17])
    config = PromptCacheConfig(ratio=0.3, queries=["context", "repeat", "self_study"], study_samples=2, study_tokens=19)
    whole = engine.compact(tokens, config, ContextPrompts(requests=[question]))
    rollouts = engine.generate(questions, SAMPLING, whole)
    widths: list[int] = []
    hidden = engine._hidden
    monkeypatch.setattr(engine, "_hidden", lambda ids, *rest: widths.append(ids.shape[1]) or hidden(ids, *rest))
    monkeypatch.setattr("rollout.context.cache.ContextCache.piece", 7)
    pieces = engine.compact(tokens, config, ContextPrompts(requests=[question]))
    for ours, theirs in zip(pieces.layers, whole.layers, strict=True):
        assert torch.equal(ours.positions, theirs.positions)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    repeated = engine.simulate(questions, [r.completion_ids for r in rollouts], context=whole)
    assert gap([torch.tensor(r.model_logprobs) for r in repeated], rollouts) <= 1e-5
    assert max(widths) == 7
    assert min(width for width in widths if width > 1) >= 4


def test_a_second_reading_continues_the_first() -> None:
    """Each row of a batch at its own end."""
    engine, (first, second, *continuations) = engine_of("qwen3"), prompts_of("qwen3", [9, 4, 5, 6])
    cache = ContextCache(None)
    engine._read([first, second], cache)
    cache.begin_prefill([5, 6], torch.device("cpu"))
    ids = torch.tensor([[*continuations[0], 0], continuations[1]])
    hidden = engine._hidden(ids, torch.tensor([[9], [4]]) + torch.arange(6), cache)
    assert cache.lengths == cache.seen == [14, 10]
    for row, text in enumerate(([*first, *continuations[0]], [*second, *continuations[1]])):
        expected = engine._read([text], ContextCache(None)).hidden[0]
        torch.testing.assert_close(hidden[row, len(continuations[row]) - 1], expected, atol=1e-5, rtol=1e-5)
