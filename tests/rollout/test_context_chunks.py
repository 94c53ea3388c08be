"""Text-based chunking (`chunking: text`): parts of a context are read and compacted alone, and RoPE turns their kept
keys to the parts' places in the context.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from continued import check_continuation, engine_of
from judging import trainer_gap
from tiny import model_of, prompts_of
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

from rollout import SamplingConfig
from rollout.context import PromptCacheConfig, compact
from rollout.context.budgets import sensitivity
from rollout.context.reader import ContextPrompts, check_movable, moved
from rollout.measure.contexts import Questions, compacted_contexts
from sparse_rl.attention.families import FAMILIES, HYBRID, windows_of
from sparse_rl.attention.interface import NO_MASK, KVView
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.data.tokens import SplitPrompt
from sparse_rl.errors import UserError
from sparse_rl.trace import TraceError

MODELS = ["qwen2", "qwen3", "llama", "stories260K"]
SAMPLING = SamplingConfig(max_tokens=12, seed=1, ignore_eos=True)
CONFIG = PromptCacheConfig(ratio=0.3, first=2, last=3, chunk=20, chunking="text")
PARTS = [(0, 18), (18, 36), (36, 55)]  # of the 55 tokens between the first 2 and the last 3
ROPE = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPE)
def test_moved_keys_equal_keys_computed_at_their_positions(kind: str) -> None:
    """Up to 60,000 further on, within 1e-6 of their norm, also for scaled RoPE. Controls: one position less, and yarn's
    scale."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPE[kind]}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=2**17, rope_parameters=rope)
    check_movable(config)
    rotary, generator = LlamaRotaryEmbedding(config), torch.Generator().manual_seed(0)
    assert (rotary.attention_scaling != 1) == (kind == "yarn")
    keys = torch.randn(1, 2, 50, 32, generator=generator)

    def at(positions: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(keys, keys, *rotary(keys, positions[:, 0]))[1]

    old = torch.randint(300, (1, 1, 50), generator=generator).expand(1, 2, 50)
    for by in (1, 700, 60_000):
        wanted, norm = at(old + by), keys.norm(dim=-1, keepdim=True)
        assert float(((moved(rotary, at(old), old, old + by) - wanted) / norm).abs().max()) <= 1e-6
        assert float(((moved(rotary, at(old), old, old + by - 1) - wanted) / norm).abs().max()) > 1e-2


def keys_of(model: Any, tokens: list[int], positions: list[int]) -> list[torch.Tensor]:
    """Return each layer's keys [1, Hkv, T, D] of tokens read alone, if RoPE turns them to `positions` instead."""
    decoder, projected, hooks = model.get_decoder(), [], []
    for layer in decoder.layers:
        module = getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)
        hooks.append(module.register_forward_hook(lambda module, given, out: projected.append(out)))
    with torch.no_grad():
        decoder(input_ids=torch.tensor([tokens]), use_cache=False)
        cos, sin = decoder.rotary_emb(torch.empty(0), torch.tensor([positions]))
    for hook in hooks:
        hook.remove()
    heads = [k.view(1, len(tokens), -1, decoder.layers[0].self_attn.head_dim).transpose(1, 2) for k in projected]
    return [apply_rotary_pos_emb(k, k, cos, sin)[1] for k in heads]


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_read_alone_and_their_keys_are_moved(name: str) -> None:
    """The entries are those of three texts, each with the first 2 and last 3 tokens around a part, at the right
    positions. Control: a context read as a whole."""
    engine, (tokens,) = engine_of(name), prompts_of(name, [60])
    studied = engine.study(tokens, CONFIG)
    assert [(part.start, part.end) for part, _ in studied.parts] == PARTS
    plain = engine.study(tokens, replace(CONFIG, chunking="kv"))
    assert studied.nbytes == studied.whole.nbytes == plain.nbytes
    expected = torch.zeros(len(studied.whole.layers), *plain.whole.layers[0].keys.shape[1:])
    for start, end in PARTS:
        inner = [2 + place for place in range(start, end)]
        text = [*tokens[:2], *(tokens[place] for place in inner), *tokens[57:]]
        positions = [0, 1, *inner, *(inner[-1] + n for n in (1, 2, 3))]
        for layer, keys in enumerate(keys_of(model_of(name), text, positions)):
            places = positions if (start, end) == PARTS[-1] else positions[:-3]
            expected[layer, :, places[2 if start else 0 :]] = keys[0, :, 2 if start else 0 : len(places)]
    for layer, (entries, target) in enumerate(zip(studied.whole.layers, expected, strict=True)):
        order = entries.positions.argsort(-1)
        assert torch.equal(entries.positions.gather(2, order), torch.arange(60).expand_as(order))
        keys = entries.keys.gather(2, order[..., None].expand_as(entries.keys))[0]
        assert float((keys - target).abs().max() / target.abs().max()) <= 1e-6
        if layer:
            assert float((plain.whole.layers[layer].keys[0] - target).abs().max() / target.abs().max()) > 1e-3


@pytest.mark.parametrize(
    "changed",
    [{}, {"select": "omp"}, {"policy": "evict"}, {"pool": 3}, {"heads": "pyramid"}, {"first": 0, "last": 0}],
    ids=str,
)
@pytest.mark.few(3)
def test_parts_are_compacted_alone(changed: dict) -> None:
    """The entries that a part's text keeps as a context of its own, with the same biases and values."""
    engine, (tokens,) = engine_of("stories260K"), prompts_of("stories260K", [60])
    config = replace(CONFIG, **changed)
    context = engine.compact(tokens, config)
    edges, between = config.first + config.last, 60 - config.first - config.last
    counts = [int(layer.keys.shape[2]) - edges for layer in context.layers]
    places = [edges] * len(counts)
    for part in config.parts(60):
        inner = tokens[config.first : 60 - config.last][part.start : part.end]
        text = [*tokens[: config.first], *inner, *tokens[60 - config.last :]]
        shares = [count * part.end // between - count * part.start // between for count in counts]
        whole = replace(config, chunk=4096, chunking="kv")
        alone = engine.study(text, whole).compacted(whole, [[n] * 4 for n in shares])
        for layer, (ours, theirs) in enumerate(zip(context.layers, alone.layers, strict=True)):
            held, own = slice(places[layer], places[layer] + shares[layer]), slice(edges, edges + shares[layer])
            assert torch.equal(ours.positions[:, :, held], theirs.positions[:, :, own] + part.start)
            assert torch.equal(ours.bias[:, :, held], theirs.bias[:, :, own])
            assert torch.equal(ours.values[:, :, held], theirs.values[:, :, own])
            places[layer] += shares[layer]
    assert places == [count + edges for count in counts]


@pytest.mark.parametrize("policy", ["am", "evict"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(4)
def test_continuations_attend_to_the_moved_entries(name: str, policy: str) -> None:
    """Continuations have the log-probs of a slow reference over the kept entries, up to 1e-5."""
    engine, (tokens, question) = engine_of(name), prompts_of(name, [60, 5])
    config = replace(CONFIG, policy=policy, queries=["repeat", "self_study"], study_samples=1, study_tokens=4)
    context = engine.compact(tokens, config, ContextPrompts(requests=[question]))
    assert context.entries == 2 + 3 + 16
    assert context.trace(66).evict_at.shape[-1] == 66
    check_continuation(engine, context, question)


def test_one_part_equals_a_context_that_is_read_as_a_whole() -> None:
    """Control: with three parts they differ."""
    engine, (tokens, question) = engine_of("qwen3"), prompts_of("qwen3", [60, 5])
    one, kv, three = (
        engine.compact(tokens, replace(CONFIG, **changed))
        for changed in ({"chunk": 55}, {"chunk": 55, "chunking": "kv"}, {})
    )
    for ours, theirs in zip(one.layers, kv.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    first, second, third = (engine.generate([question], SAMPLING, context)[0] for context in (one, kv, three))
    assert first.logprobs == second.logprobs != third.logprobs


def test_heads_keep_their_own_numbers_of_entries() -> None:
    """`counts` may differ by head, also if a part gets none. Sensitivity curves can be measured."""
    engine, (tokens, question) = engine_of("stories260K"), prompts_of("stories260K", [60, 5])
    config = replace(CONFIG, first=0, last=0)
    studied = engine.study(tokens, config)
    sizes = [[1 + layer + 3 * head for head in range(4)] for layer in range(5)]
    context = studied.compacted(config, sizes)
    assert (context.evict_at() > 60).sum(-1).tolist() == sizes
    check_continuation(engine, context, question)
    lengths = sensitivity([studied], config, lambda number, kept: float(kept.entries), [0.1, 0.5], 0.1)
    assert lengths.unique().tolist() == [6.0, 30.0]


def test_baselines_are_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """`full` and `none` equal those without chunking; settings that differ in a part's size are read separately."""
    engine, (tokens,) = engine_of("stories260K"), prompts_of("stories260K", [60])
    settings = [CONFIG, replace(CONFIG, policy="full"), replace(CONFIG, chunk=30), replace(CONFIG, ratio=0.1)]
    settings = [replace(config, first=0) for config in settings]
    reads: list[int] = []
    prefill = compact.prefill
    monkeypatch.setattr(compact, "prefill", lambda tokens, *rest: reads.append(len(tokens)) or prefill(tokens, *rest))
    questions = Questions([SplitPrompt(tokens, 2, [7])], ContextPrompts())
    results = {item.cache: item for item in compacted_contexts(engine, questions, settings)}
    assert len(reads) == 3 + 2 + 1
    full = engine.compact(tokens, PromptCacheConfig(policy="full"))
    assert torch.equal(results[1].context.layers[2].keys, full.layers[2].keys)
    assert not torch.equal(results[0].context.layers[2].positions, results[2].context.layers[2].positions)
    assert results[0].costs.whole_bytes == full.nbytes


class FirstKeys(KVView):
    """A `kv_view` that keeps the keys of the first layer [1, Hkv, T, D]."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> Any:
        if layer == 0:
            self.keys = key
        return torch.zeros_like(query)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in HYBRID])
def test_keys_are_moved_only_where_rope_turns_them_whole(family: str) -> None:
    """First-layer keys equal those at the new positions. Partial RoPE is refused. Control: unmoved keys."""
    model = model_of(family)
    if any(windows_of(model.config)):
        with pytest.raises(UserError, match=r"chunking: the model has layers with sliding windows.*use chunking: kv"):
            check_movable(model.config)
        return

    def keys_at(positions: torch.Tensor) -> torch.Tensor:
        view, ids = FirstKeys(), torch.arange(3, 13)[None]
        with torch.no_grad():
            model.get_decoder()(
                input_ids=ids, position_ids=positions[None], attention_mask=NO_MASK, kv_view=view, use_cache=False
            )
        return view.keys

    reasons = {
        **dict.fromkeys(("phi3", "glm4_moe", "smollm3"), "RoPE turns only a part of the model's keys"),
        "glm4": "the model's RoPE turns neighbouring dimensions of a key together",
        "ministral3": "the model's queries are multiplied by a factor that grows with the position",
    }
    if family in reasons:
        with pytest.raises(UserError, match=f"chunking: {reasons[family]}.*use chunking: kv"):
            check_movable(model.config)
        return
    check_movable(model.config)
    old, new = torch.arange(10), torch.arange(100, 110)
    keys = keys_at(old)
    shape = keys.shape[:3]
    places = [x.expand(shape) for x in (old, new)]
    result, wanted = moved(model.get_decoder().rotary_emb, keys, *places), keys_at(new)
    assert float((result - wanted).abs().max() / wanted.abs().max()) <= 1e-5
    assert float((keys - wanted).abs().max() / wanted.abs().max()) > 1e-2  # control


def test_a_context_of_a_model_with_experts_is_not_replayed() -> None:
    """The context's experts are not recorded. Control: traces of a dense model are replayed."""
    for family, config in ((f, c) for f in ("qwen3", "qwen3_moe") for c in ("evict", "am")):
        engine, (tokens, question) = engine_of(family), prompts_of(family, [60, 5])
        context = engine.compact(tokens, replace(CONFIG, chunking="kv", policy=config, queries=["context"]))
        rollouts = engine.generate([question], SAMPLING, context)
        if family == "qwen3":
            assert trainer_gap(model_of(family), rollouts) <= 1e-5
            continue
        with pytest.raises(TraceError, match="can be replayed only for a dense model") as refusal:
            replay_logprobs(model_of(family), rollouts)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose RoPE has other frequencies for longer texts cannot move keys. Control: `chunking: kv` works."""
    engine, (tokens,) = engine_of("qwen2"), prompts_of("qwen2", [60])
    monkeypatch.setattr(engine.model.config, "rope_parameters", {"rope_type": kind, "factor": 2.0})
    with pytest.raises(UserError, match=f"RoPE of type {kind} depends on the length") as caught:
        engine.compact(tokens, CONFIG)
    assert caught.value.key == "chunking"
    assert "\n" not in str(caught.value)
    engine.compact(tokens, replace(CONFIG, chunking="kv"))


def test_evictions_are_not_replayed_after_separate_readings() -> None:
    """No trace says that parts were read without each other. Control: a single part."""
    engine, (tokens, question) = engine_of("qwen2"), prompts_of("qwen2", [60, 5])
    parts, single = (
        engine.generate([question], SAMPLING, engine.compact(tokens, replace(CONFIG, policy="evict", chunk=chunk)))
        for chunk in (20, 55)
    )
    with pytest.raises(TraceError, match="no view replays traces with the sections evict_at, compacted_at"):
        replay_logprobs(model_of("qwen2"), parts)
    assert trainer_gap(model_of("qwen2"), single) <= 1e-5


def test_baselines_equal_those_that_are_compacted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside parts with other first tokens, on-policy queries that are too many together, and a summary."""
    engine, (tokens, request) = engine_of("stories260K"), prompts_of("stories260K", [60, 5])
    monkeypatch.setattr("rollout.context.compact.MOST_LOGITS", 100)
    parts = PromptCacheConfig(policy="evict", chunks=5, first=0, queries=["context"])
    on_policy = PromptCacheConfig(first=0, queries=["context", "repeat"], on_policy=True)
    summary = PromptCacheConfig(first=0, summary="plain", summary_tokens=9)
    questions = Questions([SplitPrompt(tokens, 2, [7])], ContextPrompts(summaries={"plain": request}))
    for beside in (parts, on_policy, summary):
        for policy, first in (("none", 0), ("none", 5), ("full", 0)):
            baseline = PromptCacheConfig(policy=policy, first=first)
            results = {item.cache: item for item in compacted_contexts(engine, questions, [beside, baseline])}
            alone = engine.compact(tokens, replace(baseline, first=baseline.first + 2))
            for ours, theirs in zip(results[1].context.layers, alone.layers, strict=True):
                assert torch.equal(ours.positions, theirs.positions)
                assert torch.equal(ours.keys, theirs.keys)
