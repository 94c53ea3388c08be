"""Baselines of Attention Matching (appendices B.3 and E, section 4.4): KVzip's budgets over heads, DuoAttention's
partition of the heads, maximum pooling, summaries; and fits without biases or without values.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from continued import check_continuation, stories
from judging import gap, trainer_gap
from tiny import model_of

from rollout import SamplingConfig
from rollout.context import PromptCacheConfig
from rollout.context.budgets import competing_counts
from rollout.context.cache import LayerEntries, joined
from rollout.context.reader import ContextPrompts
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.matching import Block, Fit, match
from sparse_rl.methods.am.match import refit

TOKENS, LAYERS, HEADS, DIM = 60, 5, 4, 8


# ---- numbers of entries for each head -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["am", "evict"])
def test_all_heads_of_all_layers_compete(policy: str) -> None:
    """The kept entries are those of a slow reference that ranks (layer, head, entry) by maximum attention, each head's
    best first. Control: equal heads keep others."""
    engine, tokens, question = stories(5)
    config = PromptCacheConfig(policy=policy, ratio=0.2, aggregate="max", heads="global", first=2, last=3)
    studied = engine.study(tokens, config)
    ranked = []
    for layer, (entries, queries) in enumerate(zip(studied.whole.layers, studied.queries, strict=True)):
        logits = queries[0].double() @ entries.keys[0, :, 2:57].double().mT * DIM**-0.5
        for head, scores in enumerate(logits.softmax(-1).amax(1).tolist()):
            best = max(range(55), key=lambda n, scores=scores: scores[n])
            ranked += [(n != best, -score, layer, head, n) for n, score in enumerate(scores)]
    expected = torch.zeros(LAYERS, HEADS, TOKENS, dtype=torch.bool)
    expected[:, :, [0, 1, 57, 58, 59]] = True
    for _, _, layer, head, n in sorted(ranked)[: 11 * LAYERS * HEADS]:
        expected[layer, head, 2 + n] = True
    context = studied.compacted(config)
    assert torch.equal(context.evict_at() > TOKENS, expected)
    counts = expected.sum(-1)
    assert int(counts.max()) > int(counts.min())
    assert competing_counts(studied.scores(config), 11 * LAYERS * HEADS) == (counts - 5).tolist()
    equal = studied.compacted(replace(config, heads="equal"))
    assert not torch.equal(equal.evict_at(), context.evict_at())
    r = check_continuation(engine, context, question)
    if policy == "evict":
        assert trainer_gap(model_of("stories260K"), [r]) <= 1e-5


def test_the_best_entry_of_each_head_is_kept() -> None:
    """Also if the total is below the number of heads. Control: of equal scores, the earlier entries are kept."""
    scores = torch.tensor([[[5.0, 6.0, 7.0]], [[0.1, 0.3, 0.2]], [[4.0, 8.0, 3.0]]])
    assert competing_counts(scores, 4) == [[2], [1], [1]]
    assert competing_counts(scores, 6) == [[3], [1], [2]]
    assert competing_counts(scores, 1) == [[1], [1], [1]]
    assert competing_counts(torch.ones(3, 1, 3), 4) == [[2], [1], [1]]


def test_heads_that_compete_need_queries_before_the_pass() -> None:
    engine, tokens, _ = stories(5)
    with pytest.raises(UserError, match="heads cannot compete by on-policy queries") as caught:
        PromptCacheConfig(heads="global", on_policy=True)
    assert caught.value.key == "heads"
    both = PromptCacheConfig(heads="global", on_policy=True, queries=["context", "repeat"], first=0)
    counts = (engine.compact(tokens, both).evict_at() > TOKENS).sum(-1)
    assert int(counts.sum()) == 6 * LAYERS * HEADS
    assert len(counts.unique()) > 1


@pytest.mark.parametrize(("ratio", "whole"), [(0.05, 1), (0.2, 4), (0.5, 10), (1.0, 20)])
def test_a_partition_keeps_whole_heads(ratio: float, whole: int, tmp_path: Path) -> None:
    """Those with the largest budgets keep all 55 entries, others one. Control: `equal` follows budgets by degrees."""
    engine, tokens, _ = stories(5)
    shares = torch.rand(LAYERS, HEADS, generator=torch.Generator().manual_seed(1))
    file = tmp_path / "heads.json"
    file.write_text(json.dumps({"shares": shares.tolist()}))
    config = PromptCacheConfig(policy="evict", ratio=ratio, heads="partition", budgets=str(file), first=2, last=3)
    counts = (engine.compact(tokens, config).evict_at() > TOKENS).sum(-1) - 5
    largest = shares.flatten().topk(whole).indices
    assert counts.flatten()[largest].tolist() == [55] * whole
    assert int((counts == 1).sum()) == LAYERS * HEADS - whole
    by_degrees = (engine.compact(tokens, replace(config, heads="equal")).evict_at() > TOKENS).sum(-1) - 5
    assert len(by_degrees.unique()) > 2


def test_a_head_without_entries_is_padded() -> None:
    """A head with no entries joins others as masked entries."""
    full = make_entries(3)
    layer = joined([full, make_entries(0)])
    assert layer.bias[0].tolist() == [[0.0] * 3, [float("-inf")] * 3]
    assert torch.equal(layer.keys[:, :1], full.keys)
    assert bool(layer.keys.isfinite().all())


def make_entries(count: int) -> LayerEntries:
    shape = 1, 1, count
    keys = torch.ones(*shape, DIM)
    return LayerEntries(keys, keys, torch.zeros(shape), torch.zeros(shape, dtype=torch.long))


# ---- scores and fits ------------------------------------------------------------------------------------------------


def test_scores_are_pooled_by_their_maximum() -> None:
    """Over an entry and three competing entries on each side. Control: the mean keeps other entries."""
    engine, tokens, _ = stories(5)
    config = PromptCacheConfig(policy="evict", ratio=0.2, queries=["window"], pool=7, pooling="max", first=2, last=3)
    studied = engine.study(tokens, config)
    context, mean = studied.compacted(config), studied.compacted(replace(config, pooling="mean"))
    for layer, (entries, queries) in enumerate(zip(studied.whole.layers, studied.queries, strict=True)):
        shares = (queries.double() @ entries.keys.double().mT * DIM**-0.5)[..., 2:-3].softmax(-1)
        scores = shares.square().mean(2).sqrt()
        near = torch.stack([scores[..., max(0, at - 3) : at + 4].amax(-1) for at in range(55)], dim=-1)
        best = near.sort(dim=-1, descending=True, stable=True).indices[..., :11].sort(-1).values + 2
        assert torch.equal(context.layers[layer].positions[:, :, 5:], best)
    assert not torch.equal(context.evict_at(), mean.evict_at())


@pytest.mark.parametrize("pool", [1, 3])
def test_values_that_overflow_are_refused(pool: int) -> None:
    """Fitted values exceed float32. Control: with `fit_values: false` the values stay as they are."""
    engine, tokens, _ = stories(5)
    config = PromptCacheConfig(ratio=0.2, pool=pool, ridge=1e-9)
    studied = engine.study(tokens, config)
    signs = torch.where(torch.rand(studied.whole.layers[0].values.shape, generator=torch.Generator()) > 0.5, 1.0, -1.0)
    layers = [replace(layer, values=3.4e38 * signs) for layer in studied.whole.layers]
    large = replace(studied, whole=replace(studied.whole, layers=layers))
    with pytest.raises(NotFiniteError, match="a fitted value is not finite"):
        large.compacted(config)
    large.compacted(replace(config, fit_values=False))


@pytest.mark.parametrize("select", ["attention", "omp"])
def test_biases_and_values_can_be_left_out(select: str) -> None:
    """Without biases, values are fitted to the attention without biases; without values, biases stay; without both, the
    entries are those of `evict`, and can be replayed."""
    engine, tokens, question = stories(5)
    config = PromptCacheConfig(ratio=0.2, select=select, first=0)
    studied = engine.study(tokens, config)
    whole, no_values, no_biases, neither = (
        studied.compacted(replace(config, fit_biases=biases, fit_values=values))
        for biases in (True, False)
        for values in (True, False)
    )
    evicted = studied.compacted(replace(config, policy="evict"))
    competing = torch.ones(1, 1, TOKENS, dtype=torch.bool)
    for layer, (entries, queries) in enumerate(zip(studied.whole.layers, studied.queries, strict=True)):
        block = Block(entries.keys, entries.values, queries, entries.bias, competing, DIM**-0.5)
        index, bias, values = match(block, 12, Fit(select))
        for context in (whole, no_biases, no_values, neither, evicted):
            assert torch.equal(context.layers[layer].positions, index)
        assert torch.equal(whole.layers[layer].bias, bias)
        assert torch.equal(whole.layers[layer].values, values)
        assert torch.equal(no_values.layers[layer].bias, bias)
        assert torch.equal(no_values.layers[layer].values, evicted.layers[layer].values)
        assert not bool(no_biases.layers[layer].bias.any())
        x = (queries.double() @ block.keys.gather(2, index[..., None].expand(-1, -1, -1, DIM)).double().mT) * DIM**-0.5
        y = block.logits().softmax(-1) @ entries.values.double()
        ours = x.softmax(-1) @ no_biases.layers[layer].values.double()
        theirs = x.softmax(-1) @ evicted.layers[layer].values.double()
        assert float((ours - y).norm()) < float((theirs - y).norm())
        assert torch.equal(no_biases.layers[layer].values, refit(block, index, Fit(select, biases=False))[1])
    assert (whole.fitted, no_biases.fitted, no_values.fitted, neither.fitted) == (True, True, True, False)
    (r,) = engine.generate([question], SamplingConfig(8, seed=1, ignore_eos=True), neither)
    assert trainer_gap(model_of("stories260K"), [r]) <= 1e-5


# ---- summaries ------------------------------------------------------------------------------------------------------


def drop_last(answers: list[list[int]]) -> list[int]:
    """Return the tokens of answers, each without its last token, as the text of a summary."""
    return [token for answer in answers for token in answer[:-1]]


def test_a_summary_takes_the_contexts_place() -> None:
    """`full` keeps the model's answer whole, as a plain prompt would; `am` keeps a share. Control: another request
    gives another summary."""
    engine, tokens, request = stories(5)
    prompts = ContextPrompts(summaries={"plain": request, "concise": request[:3]}, text=drop_last)
    config = PromptCacheConfig(policy="full", summary="plain", summary_tokens=21, first=2, last=3, seed=5)
    context = engine.compact(tokens, config, prompts)
    whole = engine.compact(tokens, PromptCacheConfig(policy="full"))
    (written,) = engine.generate([request], SamplingConfig(21, seed=5), whole)
    expected = [*tokens[:2], *written.completion_ids[:-1], *tokens[57:]]
    assert context.tokens == expected
    assert context.entries == len(expected)
    assert "summary" in context.seconds
    sampling = SamplingConfig(8, temperature=0.0, ignore_eos=True)
    (r,) = engine.generate([request], sampling, context)
    (plain,) = engine.generate([[*expected, *request]], sampling)
    assert r.completion_ids == plain.completion_ids
    assert gap([torch.tensor(plain.logprobs)], [r]) <= 1e-5
    assert trainer_gap(model_of("stories260K"), [r]) <= 1e-5
    compacted = engine.compact(tokens, replace(config, policy="am", ratio=0.5), prompts)
    assert compacted.tokens == expected
    assert compacted.entries == 5 + round(0.5 * (len(expected) - 5))
    assert engine.compact(tokens, replace(config, summary="concise"), prompts).tokens != expected


def test_parts_are_summarized_alone() -> None:
    """Between the first and the last tokens; the summaries follow each other."""
    engine, tokens, request = stories(5)
    prompts = ContextPrompts(summaries={"plain": request}, text=drop_last)
    config = PromptCacheConfig(policy="none", summary="plain", summary_tokens=9, chunks=3, first=2, last=3, seed=5)
    expected = tokens[:2]
    for start, end in ((2, 20), (20, 38), (38, 57)):
        text = [*tokens[:2], *tokens[start:end], *tokens[57:], *request]
        whole = engine.compact(text[: -len(request)], PromptCacheConfig(policy="full"))
        (written,) = engine.generate([request], SamplingConfig(9, seed=5), whole)
        expected = [*expected, *written.completion_ids[:-1]]
    context = engine.compact(tokens, config, prompts)
    assert context.tokens == [*expected, *tokens[57:]]
    assert context.entries == 5


def test_a_summary_that_is_not_written_is_refused() -> None:
    engine, tokens, request = stories(5)
    config = PromptCacheConfig(summary="plain", summary_tokens=4)
    with pytest.raises(UserError, match="summaries need prompts that ask for them") as caught:
        engine.compact(tokens, config)
    assert caught.value.key == "summary"
    empty = ContextPrompts(summaries={"plain": request}, text=lambda answers: [])
    with pytest.raises(UserError, match="the model wrote no summary within 4 tokens; raise summary_tokens") as caught:
        engine.compact(tokens, config, empty)
    assert caught.value.key == "summary"
