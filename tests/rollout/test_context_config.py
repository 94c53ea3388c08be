"""Settings of a context's compaction: baselines, reference queries of a window, pooled scores, layers and heads that
keep different numbers of entries, and a long context that is compacted chunk by chunk.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from continued import stories
from judging import gap, trainer_gap
from tiny import model_of

from rollout import SamplingConfig, make_engine
from rollout.context import Context, ContextCache, PromptCacheConfig, compact
from rollout.context.budgets import planned, pyramid, save
from rollout.context.cache import LayerEntries
from rollout.context.compact import Studied
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.matching import Block, Fit, match, refit
from sparse_rl.policies import make_policy

SAMPLING = SamplingConfig(max_tokens=12, seed=1, ignore_eos=True)
TOKENS, LAYERS, HEADS, DIM = 60, 5, 4, 8


def same(ours: Context, theirs: Context) -> bool:
    """Return True if two contexts have the same entries, bit for bit."""
    pairs = zip(ours.layers, theirs.layers, strict=True)
    return all(torch.equal(a, b) for own_part, other in pairs for a, b in zip(own_part, other, strict=True))


def kept_counts(context: Context) -> list[list[int]]:
    """Return the number of kept entries of each layer and head."""
    return (context.evict_at() > len(context.tokens)).sum(-1).tolist()


# ---- baselines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "none"])
def test_baselines_read_the_context_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "full" keeps all entries, "none" the first 2 and last 3; both are replayed, and need no reference queries."""
    engine, tokens, question = stories(5)
    reads: list[ContextCache] = []
    read = engine._read
    monkeypatch.setattr(engine, "_read", lambda texts, cache: reads.append(cache) or read(texts, cache))
    config = PromptCacheConfig(policy=policy, first=2, last=3, queries=[], heads="pyramid")
    context = engine.compact(tokens, config)
    assert len(reads) == 1
    assert not reads[0].of_policy.captures
    assert "queries" not in context.seconds
    assert kept_counts(context) == [[TOKENS if policy == "full" else 5] * HEADS] * LAYERS
    assert not context.fitted
    (r,) = engine.generate([question], SAMPLING, context)
    assert trainer_gap(model_of("stories260K"), [r]) <= 1e-5
    (plain,) = engine.simulate([[*tokens, *question]], [r.completion_ids])
    assert (gap([torch.tensor(plain.model_logprobs)], [r]) <= 1e-5) == (policy == "full")


def test_an_answer_without_a_kept_context_equals_the_answer_without_a_context() -> None:
    """Under RoPE only distances matter."""
    engine, tokens, question = stories(5)
    (r,) = engine.generate([question], SAMPLING, engine.compact(tokens, PromptCacheConfig(policy="none", first=0)))
    (alone,) = engine.simulate([question], [r.completion_ids])  # only distances count under RoPE
    assert gap([torch.tensor(alone.model_logprobs)], [r]) <= 1e-4


def test_each_compaction_reports_its_own_seconds() -> None:
    """Three contexts from one reading report its seconds, "am" and "evict" also their own; "full" has none."""
    engine, tokens, _ = stories(5)
    studied = engine.study(tokens, PromptCacheConfig())
    contexts = [studied.compacted(PromptCacheConfig(policy=policy)) for policy in ("am", "evict", "full")]
    assert [sorted(c.seconds) for c in contexts] == [["compaction", "prefill", "queries"]] * 2 + [
        ["prefill", "queries"]
    ]
    assert contexts[0].seconds["compaction"] != contexts[1].seconds["compaction"]
    assert studied.seconds == contexts[2].seconds


# ---- queries and scores ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [7, TOKENS, 1000])
def test_reference_queries_of_a_window_are_the_contexts_last_queries(window: int) -> None:
    engine, tokens, _ = stories(5)
    context_queries = engine.study(tokens, PromptCacheConfig(queries=["context"])).queries
    ours = engine.study(tokens, PromptCacheConfig(queries=["window"], window=window)).queries
    for own_part, theirs in zip(ours, context_queries, strict=True):
        assert torch.equal(own_part, theirs.unflatten(2, (2, TOKENS))[:, :, :, -window:].flatten(2, 3))
    both = engine.study(tokens, PromptCacheConfig(queries=["window", "context"], window=window)).queries
    assert torch.equal(both[1], torch.cat([ours[1], context_queries[1]], dim=2))


@pytest.mark.parametrize("policy", ["am", "evict"])
def test_scores_are_pooled_over_neighbours(policy: str) -> None:
    """The mean over an entry and two on each side, as in SnapKV. Controls: no pooling; a NaN score is an error."""
    engine, tokens, _ = stories(5)
    config = PromptCacheConfig(ratio=0.2, policy=policy, aggregate="mean", queries=["window"], pool=5, first=2, last=3)
    studied = engine.study(tokens, config)
    context, other = studied.compacted(config), studied.compacted(replace(config, pool=1))
    for layer, (entries, queries) in enumerate(zip(studied.whole.layers, studied.queries, strict=True)):
        shares = (queries.double() @ entries.keys.double().mT * DIM**-0.5)[..., 2:-3].softmax(-1).mean(2)
        near = [shares[..., max(0, at - 2) : at + 3].mean(-1) for at in range(shares.shape[-1])]
        best = torch.stack(near, dim=-1).topk(11, dim=-1).indices.sort(-1).values + 2
        assert torch.equal(context.layers[layer].positions[:, :, 5:], best)
        if policy == "am":  # refitted as `match` refits the entries that it selects itself
            block = Block(entries.keys, entries.values, queries, entries.bias, competing(2, 3), DIM**-0.5)
            bias, values = refit(block, best, Fit())
            assert torch.equal(context.layers[layer].bias[:, :, 5:], bias)
            assert torch.equal(context.layers[layer].values[:, :, 5:], values)
    assert not same(context, other)
    broken = LayerEntries(*(x.clone() for x in studied.whole.layers[0]))
    broken.keys[0, 0, 7] = float("nan")
    with pytest.raises(NotFiniteError, match="a NaN score"):
        replace(studied, whole=Context(tokens, [broken], False)).compacted(config)


@pytest.mark.parametrize("policy", ["full", "evict", "am"])
def test_a_context_that_is_not_finite_is_refused(policy: str) -> None:
    """Before entries are selected, because a kept NaN would spoil every answer."""
    engine, tokens, _ = stories(5)
    model = copy.deepcopy(engine.model)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[1, 1] = float("nan")
    broken = make_engine("hf", model=model, policy=make_policy("full"))
    config = PromptCacheConfig(ratio=0.2, policy=policy, first=2, last=3)
    engine.compact(tokens, config)
    with pytest.raises(NotFiniteError, match=r"^the context's keys or values are not finite in layer 0: the model's"):
        broken.compact(tokens, config)


def competing(first: int, last: int, tokens: int = TOKENS) -> torch.Tensor:
    """Return bool [1, 1, tokens]: True for the tokens between the first and the last ones."""
    position = torch.arange(tokens)
    return ((position >= first) & (position < tokens - last)).expand(1, 1, -1)


# ---- number of entries in each layer and head -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "most", "layers", "ends"),
    [
        (100, 1000, 11, (195, 5)),
        (100, 150, 11, (150, 50)),
        (10, 1000, 10, (19, 1)),
        (7, 7, 4, (7, 7)),
        (9, 50, 1, (9, 9)),
    ],
)
def test_a_pyramid_falls_linearly_over_the_layers(mean: int, most: int, layers: int, ends: tuple[int, int]) -> None:
    """Up to rounding, between 1 and `most`, with the given mean."""
    result = pyramid(mean, most, layers)
    expected = torch.linspace(*ends, layers)
    assert (torch.tensor(result) - expected).abs().max() <= 1


def test_every_pyramid_has_the_given_mean() -> None:
    for mean, extra, layers in itertools.product(range(1, 30), (0, 1, 7, 31), range(1, 9)):
        computed = pyramid(mean, mean + extra, layers)
        assert sum(computed) == mean * layers, (mean, extra, layers)
        assert 1 <= min(computed) <= max(computed) <= mean + extra, (mean, extra, layers)


def test_layers_and_heads_keep_the_planned_number_of_entries(tmp_path: Path) -> None:
    """By a pyramid, a file of budgets, or explicit counts, besides the first 2. "full" and "none" ignore budgets."""
    engine, tokens, _ = stories(5)
    config = PromptCacheConfig(ratio=0.2, heads="pyramid", first=2)
    assert planned(config, TOKENS, range(LAYERS), HEADS) == [[count] * HEADS for count in (23, 18, 12, 6, 1)]
    assert kept_counts(engine.compact(tokens, config)) == [[count + 2] * HEADS for count in (23, 18, 12, 6, 1)]
    save(tmp_path / "budgets.json", torch.tensor([[1.0, 2, 3, 4]] * 4 + [[2.0, 2, 2, 4]]))
    budgeted = PromptCacheConfig(ratio=0.2, budgets=str(tmp_path / "budgets.json"), first=2)
    expected = [[5, 9, 14, 19]] * 4 + [[9, 9, 9, 19]]
    assert planned(budgeted, TOKENS, range(LAYERS), HEADS) == expected
    assert kept_counts(engine.compact(tokens, budgeted)) == [[count + 2 for count in heads] for heads in expected]
    counts = [[3] * HEADS] * LAYERS
    assert kept_counts(engine.study(tokens, budgeted).compacted(budgeted, counts)) == [[5] * HEADS] * LAYERS
    for policy, count in (("full", 58), ("none", 0)):
        assert planned(replace(budgeted, policy=policy), TOKENS, range(2), 3) == [[count] * 3] * 2


def test_wrong_budgets_are_refused_before_the_context_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens, _ = stories(5)
    save(tmp_path / "other.json", torch.ones(2, 3))
    monkeypatch.setattr(engine, "_read", lambda *_: pytest.fail("read"))
    for name, message in (("absent.json", "there is no file"), ("other.json", r"\[2, 3\], but the model has \[5, 4\]")):
        with pytest.raises(UserError, match=message) as caught:
            engine.compact(tokens, PromptCacheConfig(budgets=str(tmp_path / name)))
        assert caught.value.key == "budgets"
        assert "\n" not in str(caught.value)


def test_settings_that_contradict_each_other_are_refused() -> None:
    for settings, key, message in (
        ({"queries": []}, "queries", "name at least one"),
        ({"pool": 4}, "pool", "that is odd, got 4"),
        ({"pool": 5, "select": "omp"}, "pool", "select: omp has no scores"),
        ({"pool": 5, "select": "omp_fast", "policy": "evict"}, "pool", "select: omp_fast has no scores"),
        ({"budgets": "a.json", "heads": "pyramid"}, "heads", "head budgets already set how much each head keeps"),
        ({"budgets": "a.json", "heads": "global"}, "heads", "head budgets already set how much each head keeps"),
        ({"heads": "partition"}, "heads", "a partition of the heads needs head budgets"),
        ({"heads": "global", "select": "omp"}, "heads", "select: omp has no scores"),
        ({"chunk": 0}, "chunk", ">= 1"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            PromptCacheConfig(**settings)
        assert caught.value.key == key
    PromptCacheConfig(pool=5, select="omp", policy="full")


# ---- chunk by chunk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["attention", "omp", "omp_fast"])
def test_one_chunk_equals_no_chunking(select: str) -> None:
    """To the last bit, for the 55 tokens between the first 2 and last 3. Control: a chunk of 54 gives other entries."""
    engine, tokens, _ = stories(5)
    config = PromptCacheConfig(ratio=0.2, select=select, first=2, last=3)
    studied = engine.study(tokens, config)
    context = studied.compacted(config)
    assert same(context, engine.compact(tokens, replace(config, chunk=55)))
    assert same(context, engine.compact(tokens, replace(config, chunk=20, chunks=1)))
    for layer, entries in enumerate(studied.whole.layers):
        block = Block(entries.keys, entries.values, studied.queries[layer], entries.bias, competing(2, 3), DIM**-0.5)
        index, bias, values = match(block, 11, Fit(select))
        ours = context.layers[layer]
        for own_rows, theirs in zip((ours.positions, ours.bias, ours.values), (index, bias, values), strict=True):
            assert torch.equal(own_rows[:, :, 5:], theirs)
    assert not same(context, engine.compact(tokens, replace(config, chunk=54)))


def test_chunks_that_are_too_small_for_an_entry_are_dropped() -> None:
    """60 tokens have 9 chunks, and only 3 entries are kept, in different chunks."""
    engine, tokens, _ = stories(5)
    config = PromptCacheConfig(ratio=0.05, first=0, chunk=7)  # 3 entries of 9 parts
    positions = engine.compact(tokens, config).layers[0].positions
    assert positions.shape == (1, HEADS, 3)
    assert bool((positions.diff() >= 7).all())


@pytest.mark.parametrize("changed", [{}, {"select": "omp"}], ids=str)
def test_compacting_one_head_at_a_time_equals_compacting_all_heads_together(
    changed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If memory allows only one head at a time (MOST_LOGITS), the entries are the same."""
    engine, tokens, _ = stories(5)
    config = PromptCacheConfig(ratio=0.2, **changed)
    studied = engine.study(tokens, config)
    together = studied.compacted(config)
    monkeypatch.setattr(compact, "MOST_LOGITS", 2 * TOKENS * TOKENS)  # the size for one head
    alone: list[int] = []
    monkeypatch.setattr(Studied, "head", lambda *args, of=Studied.head: alone.append(args[3]) or of(*args))
    for ours, theirs in zip(studied.compacted(config).layers, together.layers, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert alone == list(range(HEADS)) * LAYERS


@pytest.mark.parametrize("aggregate", ["rms", "mean", "max"])
def test_eviction_ranks_entries_of_the_whole_context(aggregate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores `chunk`. Control: `chunks` gives others."""
    engine, tokens, _ = stories(5)
    config = PromptCacheConfig(ratio=0.3, policy="evict", aggregate=aggregate, chunk=20)
    studied = engine.study(tokens, config)
    whole = engine.compact(tokens, replace(config, chunk=60))
    assert same(studied.compacted(config), whole)
    assert not same(engine.compact(tokens, replace(config, chunks=3)), whole)
    sizes: list[int] = []
    score = compact.attention_score
    monkeypatch.setattr(
        compact, "attention_score", lambda logits, *rest: sizes.append(logits.shape[2]) or score(logits, *rest)
    )
    monkeypatch.setattr(compact, "MOST_LOGITS", HEADS * TOKENS * 50)
    assert same(studied.compacted(config), whole)
    assert sizes == [50, 50, 18] * LAYERS


@pytest.mark.parametrize("select", ["omp", "omp_fast"])
@pytest.mark.parametrize("chunk", [20, TOKENS])
def test_eviction_keeps_the_keys_of_pursuit_unchanged(chunk: int, select: str) -> None:
    """The entries of `am`, without fits, also in chunks. Controls: `am` changes values; `attention` keeps others."""
    engine, tokens, _ = stories(5)
    config = PromptCacheConfig(ratio=0.2, policy="evict", select=select, first=2, last=3, chunk=chunk)
    studied = engine.study(tokens, config)
    context, fitted = studied.compacted(config), studied.compacted(replace(config, policy="am"))
    assert not context.fitted
    for ours, theirs, whole in zip(context.layers, fitted.layers, studied.whole.layers, strict=True):
        assert torch.equal(ours.positions, theirs.positions)
        deep = ours.positions[..., None].expand_as(ours.keys)
        assert torch.equal(ours.keys, whole.keys.gather(2, deep))
        assert torch.equal(ours.values, whole.values.gather(2, deep))
        assert not bool(ours.bias.any())
        assert not torch.equal(ours.values, theirs.values)
    most_attended = studied.compacted(replace(config, select="attention"))
    assert not torch.equal(context.layers[0].positions, most_attended.layers[0].positions)
