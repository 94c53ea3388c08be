"""On-policy reference queries (`on_policy: true`): the queries of a layer are taken while the layers below it are
already compacted. One pass of the engine equals a slow reference that goes through the paper layer by layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from continued import check_continuation, engine_of
from studying import recorded_queries
from tiny import model_of, prompts_of
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rollout.context import Context, PromptCacheConfig
from rollout.context.budgets import sensitivity
from rollout.context.cache import LayerEntries
from rollout.context.reader import ContextPrompts
from sparse_rl.errors import UserError
from sparse_rl.matching import Block, Fit, match

MODELS = ["qwen2", "qwen3", "llama", "stories260K"]
BOTH = {"queries": ["repeat", "self_study"], "study_samples": 2, "study_tokens": 9}


def queries_of(compact: Callable[..., Context], *arguments: Any) -> list[torch.Tensor]:
    """Return the reference queries of each layer that a compaction uses."""
    with recorded_queries() as queries:
        compact(*arguments)
    return queries


def in_float64(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def by_the_paper(
    model: Any, whole: Context, texts: list[list[list[int]]], count: int
) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]:
    """Compact a context layer by layer, as in appendix C.4, with plain tensors and one text at a time.

    texts : for each kind of queries, the token ids of its texts

    Returns the reference queries of each layer, and the `match` of each layer.
    """
    decoder, past = model.get_decoder(), len(whole.tokens)
    hidden = [[decoder.embed_tokens(torch.tensor([tokens])) for tokens in kind] for kind in texts]
    all_queries, fits = [], []
    for layer, entries in zip(decoder.layers, whole.layers, strict=True):
        attention, kv_heads = layer.self_attn, entries.keys.shape[1]
        projected, kinds = [], []
        for kind, states in zip(texts, hidden, strict=True):
            asking = []
            for tokens, h in zip(kind, states, strict=True):
                x = layer.input_layernorm(h)
                q, k, v = (
                    getattr(attention, name)(x).view(1, len(tokens), -1, attention.head_dim)
                    for name in ("q_proj", "k_proj", "v_proj")
                )
                if hasattr(attention, "q_norm"):
                    q, k = attention.q_norm(q), attention.k_norm(k)
                cos, sin = decoder.rotary_emb(h, torch.arange(past, past + len(tokens))[None])
                q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
                projected.append((q, k, v.transpose(1, 2)))
                asking.append(q)
            kinds.append(torch.cat(asking, dim=2).unflatten(1, (kv_heads, -1)).flatten(2, 3))
        all_queries.append(torch.cat(kinds, dim=2))
        competing = (torch.arange(past) >= 2) & (torch.arange(past) < past - 3)
        rows = competing.expand(1, 1, -1)
        block = Block(entries.keys, entries.values, all_queries[-1], entries.bias, rows, attention.scaling)
        index, bias, values = match(block, count, Fit())
        fits.append((index, bias, values))
        fixed = ~competing
        keys = torch.cat([entries.keys[:, :, fixed], entries.keys.gather(2, index[..., None].expand_as(values))], dim=2)
        values = torch.cat([entries.values[:, :, fixed], values], dim=2)
        bias = torch.cat([entries.bias[:, :, fixed], bias], dim=2)
        done = iter(projected)
        for states in hidden:
            for row, h in enumerate(states):
                q, k, v = next(done)
                k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
                b = torch.nn.functional.pad(bias, (0, q.shape[2]))
                k, v, b = (x.repeat_interleave(q.shape[1] // kv_heads, dim=1) for x in (k, v, b))
                seen = torch.ones(q.shape[2], k.shape[2]).tril(keys.shape[2]).bool()
                logits = (q @ k.mT * attention.scaling + b[:, :, None]).masked_fill(~seen, float("-inf"))
                out = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
                h = h + attention.o_proj(out)
                states[row] = h + layer.mlp(layer.post_attention_layernorm(h))
    return all_queries, fits


@pytest.mark.parametrize("name", MODELS)
def test_one_pass_equals_the_paper_layer_by_layer(name: str) -> None:
    """Queries are at most twice as far from float64 as the reference in float32; entries, biases and values are equal.
    Controls: the first layer's queries need no pass, the last layer's do."""
    engine, (tokens, question) = engine_of(name), prompts_of(name, [60, 5])
    config = PromptCacheConfig(ratio=0.2, first=2, last=3, on_policy=True, **BOTH)
    studied = engine.study(tokens, config, ContextPrompts(requests=[question]))
    with recorded_queries() as queries:
        context = studied.compacted(config)
    plain = engine.study(tokens, replace(config, on_policy=False), ContextPrompts(requests=[question]))
    with torch.no_grad():
        assert studied.texts[0] == [tokens[2:57]]
        assert len(studied.texts[1]) == 2
        assert all(text[:5] == question and len(text) > 5 for text in studied.texts[1])
        expected, fits = by_the_paper(model_of(name), studied.whole, studied.texts, 11)
        whole = replace(studied.whole, layers=[LayerEntries(*map(in_float64, layer)) for layer in studied.whole.layers])
        exact, _ = by_the_paper(copy.deepcopy(model_of(name)).double(), whole, studied.texts, 11)
    assert len(queries) == len(expected)
    rows = zip(queries, expected, exact, context.layers, fits, strict=True)
    for ours, theirs, q, layer, (index, bias, values) in rows:
        spacing = torch.finfo(torch.float32).eps * float(q.abs().max())
        assert float((ours - q).abs().max()) <= 2 * max(float((theirs - q).abs().max()), spacing)
        assert torch.equal(layer.positions[:, :, 5:], index)
        torch.testing.assert_close(layer.bias[:, :, 5:], bias, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values[:, :, 5:], values, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(queries[0], plain.queries[0], atol=1e-5, rtol=1e-5)
    assert float((queries[-1] - plain.queries[-1]).abs().max() / plain.queries[-1].abs().max()) > 1e-2
    assert not torch.equal(context.layers[-1].values, plain.compacted(config).layers[-1].values)


@pytest.mark.parametrize(
    "changed", [{}, {"select": "omp_fast"}, {"policy": "evict"}, {"chunk": 20}, {"heads": "pyramid"}], ids=str
)
@pytest.mark.few(2)
def test_continuations_attend_to_the_entries_of_the_pass(changed: dict) -> None:
    """Continuations have the log-probs of a slow reference over the kept entries, up to 1e-5."""
    engine, (tokens, question) = engine_of("stories260K"), prompts_of("stories260K", [60, 5])
    context = engine.compact(
        tokens, PromptCacheConfig(ratio=0.2, on_policy=True, **BOTH, **changed), ContextPrompts(requests=[question])
    )
    check_continuation(engine, context, question)
    assert context.fitted == (changed.get("policy") != "evict")


def test_a_layer_that_keeps_everything_has_the_queries_of_the_full_cache() -> None:
    """Heads may keep different numbers; other kinds of queries do not change, and `most_queries` draws the same."""
    engine, (tokens, question) = engine_of("stories260K"), prompts_of("stories260K", [60, 5])
    config = PromptCacheConfig(policy="evict", ratio=1.0, on_policy=True, **BOTH)
    on, off = (
        engine.study(tokens, replace(config, on_policy=value), ContextPrompts(requests=[question]))
        for value in (True, False)
    )
    for ours, theirs in zip(queries_of(on.compacted, config), off.queries, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    mixed = replace(config, queries=["context", "repeat"], most_queries=50)
    on, off = (engine.study(tokens, replace(mixed, on_policy=value)) for value in (True, False))
    for ours, theirs in zip(queries_of(on.compacted, mixed), off.queries, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    sizes = [[1 + layer + 3 * head for head in range(4)] for layer in range(5)]
    context = on.compacted(mixed, sizes)
    assert ((context.evict_at() > 60).sum(-1) - 1).tolist() == sizes


def test_each_compaction_makes_its_own_queries() -> None:
    """Two ratios have different queries, a repetition the same. A baseline needs no pass."""
    engine, (tokens,) = engine_of("stories260K"), prompts_of("stories260K", [60])
    config = PromptCacheConfig(ratio=0.1, on_policy=True)
    studied = engine.study(tokens, config)
    few, again, many = (queries_of(studied.compacted, replace(config, ratio=ratio)) for ratio in (0.1, 0.1, 0.5))
    assert torch.equal(few[-1], again[-1])
    assert torch.equal(few[0], many[0])
    assert not torch.equal(few[-1], many[-1])
    studied.reader = None
    assert studied.compacted(replace(config, policy="none")).entries == 1


def test_what_cannot_be_on_policy_is_refused() -> None:
    for settings, message in (
        ({"queries": ["context", "random"]}, "only queries of repeat, self_study and question can be on-policy"),
        ({"chunking": "text"}, "queries cannot be on-policy with chunking: text"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            PromptCacheConfig(on_policy=True, **settings)
        assert caught.value.key == "on_policy"
        PromptCacheConfig(on_policy=True, policy="full", **settings)
    engine, (tokens,) = engine_of("stories260K"), prompts_of("stories260K", [60])
    config = PromptCacheConfig(on_policy=True)
    with pytest.raises(UserError, match="heads cannot be compacted alone with on-policy queries"):
        sensitivity([engine.study(tokens, config)], config, lambda number, context: 0.0)
