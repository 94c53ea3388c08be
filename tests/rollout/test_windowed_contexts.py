"""Contexts that are compacted once, of models with sliding windows: global layers are compacted, and other layers keep
the context's last tokens. Continuations equal one plain pass over context, prompt and completion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_matched import dense_logprobs
from judging import gap, gradients, outcome, trainer_gap, weighted_sum, wrong_windows
from safetensors import safe_open
from studying import recorded_queries
from tiny import model_of, new_model, policy_of, prompts_of
from windowed import GLOBAL, KINDS, WINDOW, WINDOWS, model, plain_logprobs_after, plain_pass, windowed_model

from rollout import SamplingConfig, make_engine
from rollout.context import Context, ContextCache, PromptCacheConfig, load_context, save_context
from rollout.context.budgets import sensitivity
from rollout.context.cartridge import Cartridge, beginning, divergence, logprobs
from rollout.context.config import CartridgeConfig
from rollout.context.reader import ContextPrompts, Conversation, Reader
from rollout.hf import HFEngine
from sparse_rl.attention import windows
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.errors import UserError
from sparse_rl.trace import TraceError
from sparse_rl.trace.files import read_sealed, write_sealed

TOKENS = 60
SAMPLING = SamplingConfig(20, seed=1, ignore_eos=True)
BASE = PromptCacheConfig(ratio=0.3, first=2, last=3, study_tokens=9, study_samples=2)
SETTINGS: dict[str, dict[str, Any]] = {
    "attention": {},
    "omp": {"select": "omp"},
    "omp_fast": {"select": "omp_fast"},
    "evict": {"policy": "evict"},
    "full": {"policy": "full"},
    "none": {"policy": "none"},
    "context": {"queries": ["context"]},
    "window": {"queries": ["window"], "window": 9},
    "self_study": {"queries": ["self_study"]},
    "question": {"queries": ["question"]},
    "random": {"queries": ["random", "random_plain"]},
    "on policy": {"queries": ["repeat", "self_study"], "on_policy": True},
    "parts": {"chunk": 17, "queries": ["context", "repeat"]},
    "parts on policy": {"chunk": 17, "on_policy": True},
    "pyramid": {"heads": "pyramid"},
    "global": {"heads": "global", "chunk": 20},
    "paper": {"fit": "paper"},
    "cartridge": {"policy": "cartridge", "cartridge": CartridgeConfig(steps=6, batch=2)},
    "summary": {"summary": "plain", "summary_tokens": 41, "last": 3},
}
REPLAYED = ("evict", "full", "none", "context", "window")  # settings whose continuations can be replayed


ENGINE = make_engine("hf", model=model(), policy="full")


TEXTS = prompts_of("gemma3_text", [TOKENS, 1, 7, 25])


def about(question: list[int]) -> ContextPrompts:
    """Return prompts about a context for all kinds of reference queries."""
    return ContextPrompts(
        requests=[question],
        questions=question[:3],
        starters=lambda answer: [answer[:4]],
        summaries={"plain": question},
        text=lambda answers: [token for answer in answers for token in answer],
    )


def compacted(engine: HFEngine, texts: list[list[int]], setting: str, **changed: Any) -> Context:
    return engine.compact(texts[0], replace(BASE, **{**SETTINGS[setting], **changed}), about(texts[2]))


# ---- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.few(5)
def test_continuations_equal_one_plain_pass(setting: str) -> None:
    """Prompts of 1, 7 and 25 tokens in one batch. Controls: a window of 11 or 13, none, the entries of another layer,
    and windows that forget the context."""
    context = compacted(ENGINE, TEXTS, setting)
    assert len(context.layers) == len(GLOBAL)
    assert (setting == "summary") == (context.tokens != TEXTS[0])
    rollouts = ENGINE.generate(TEXTS[1:], SAMPLING, context)
    if setting in REPLAYED:
        assert all(r.trace.windows == WINDOWS for r in rollouts)

    def largest(*wrong: Any) -> float:
        return gap([plain_logprobs_after(model(), context, r, *wrong) for r in rollouts], rollouts)

    assert largest() <= 1e-5
    again = ENGINE.generate(TEXTS[1:], SAMPLING, context)
    assert [r.model_logprobs for r in again] == [r.model_logprobs for r in rollouts]
    controls = {str(wrong): largest([wrong, 0] * 2) for wrong in (WINDOW - 1, WINDOW + 1, 10**6)}
    controls["entries of another layer"] = largest(WINDOWS, context.layers[::-1])
    controls["forgotten windows"] = largest(WINDOWS, None, True)
    for name, control in controls.items():
        assert control >= 0.1, name


@pytest.mark.parametrize("setting", ["attention", "evict", "on policy", "parts"])
@pytest.mark.few(2)
def test_long_texts_are_read_in_pieces(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 8 tokens, whose queries attend in small groups, equal one plain pass."""
    monkeypatch.setattr(ContextCache, "piece", 8)
    monkeypatch.setattr(windows, "MOST_LOGITS", 2000)
    texts = TEXTS
    studied = ENGINE.study(texts[0], replace(BASE, **SETTINGS[setting]), about(texts[2]))
    _, plain = plain_pass(model(), texts[0])
    for entries, layer in zip(studied.whole.layers, GLOBAL, strict=True):
        torch.testing.assert_close(entries.keys, plain.captured[layer][1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entries.values, plain.captured[layer][2], atol=1e-5, rtol=1e-5)
    context = compacted(ENGINE, texts, setting)
    rollouts = ENGINE.generate(texts[1:], SAMPLING, context)
    assert gap([plain_logprobs_after(model(), context, r) for r in rollouts], rollouts) <= 1e-5
    completions = [r.completion_ids[: 5 + 6 * place] for place, r in enumerate(rollouts)]
    simulated = ENGINE.simulate(texts[1:], completions, context=context)
    assert gap([plain_logprobs_after(model(), context, r) for r in simulated], simulated) <= 1e-5
    assert gap(ENGINE.logprobs(texts[1:], completions, context), simulated) <= 1e-5


def test_a_text_of_more_tokens_than_a_piece() -> None:
    """A context of 1,100 tokens is read in pieces of 1,024. A prompt of 1,060 tokens continues it."""
    context, prompt = prompts_of("gemma3_text", [1100, 1060])
    compact = ENGINE.compact(context, PromptCacheConfig(policy="evict", ratio=0.1, queries=["window"]))
    (r,) = ENGINE.generate([prompt], SamplingConfig(5, seed=1, ignore_eos=True), compact)
    assert gap([plain_logprobs_after(model(), compact, r)], [r]) <= 1e-5


@pytest.mark.parametrize("name", ["olmo3", "qwen3", "qwen2_moe"])
def test_other_families_with_windows(name: str) -> None:
    """Windows may be in the last layers alone, and be longer than the context."""
    for window in (WINDOW, 65):
        kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
        more = {} if name == "olmo3" else {"use_sliding_window": True, "max_window_layers": 2}
        model = windowed_model(name, layer_types=kinds, sliding_window=window, **more)
        engine, texts = make_engine("hf", model=model, policy="full"), prompts_of(name, [TOKENS, 1, 7, 25])
        context = engine.compact(texts[0], replace(BASE, policy="evict"))
        rollouts = engine.generate(texts[1:], SAMPLING, context)
        sizes = [0, 0, window, window]
        if name != "qwen2_moe":  # the experts of a context are not recorded
            assert trainer_gap(model, rollouts) <= 1e-5
        assert gap([plain_logprobs_after(model, context, r, sizes) for r in rollouts], rollouts) <= 1e-5
        assert gap([plain_logprobs_after(model, context, r, [0, 0, 10**6, 10**6]) for r in rollouts], rollouts) >= 0.1


# ---- the compaction -------------------------------------------------------------------------------------------------


def by_kv_head(query: torch.Tensor, places: slice) -> torch.Tensor:
    """Return the queries of some tokens, grouped by kv head: [1, Hq, S, D] -> [1, Hkv, G x tokens, D]."""
    return query[:, :, places].reshape(1, 2, -1, query.shape[3])


@pytest.mark.parametrize("policy", ["am", "evict"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_reference_queries_are_those_of_a_plain_pass(policy: str, on_policy: bool) -> None:
    """On-policy, layers below are compacted. The entries with the most attention are kept. Control: no windows."""
    config = replace(BASE, policy=policy, on_policy=on_policy, queries=["repeat"])
    with recorded_queries() as used:
        context = ENGINE.compact(TEXTS[0], config)
    tokens, own = [*TEXTS[0], *TEXTS[0][2:-3]], slice(TOKENS, None)
    for place, layer in enumerate(GLOBAL):
        below = [context.layers[n] if n < place and on_policy else None for n in range(len(GLOBAL))]
        _, plain = plain_pass(model(), tokens, WINDOWS, below, TOKENS)
        queries, keys = by_kv_head(plain.captured[layer][0], own), plain.captured[layer][1][:, :, :TOKENS]
        torch.testing.assert_close(used[place], queries, atol=1e-5, rtol=1e-5)
        shares = (queries.double() @ keys.double().mT * model().model.layers[layer].self_attn.scaling)[..., 2:-3]
        scores = shares.softmax(-1).square().mean(2)
        best = scores.topk(round(0.3 * 55), dim=-1).indices.sort(-1).values + 2
        assert torch.equal(context.layers[place].positions[:, :, 5:], best)
        _, other = plain_pass(model(), tokens, [10**6, 0] * 2, below, TOKENS)
        assert not torch.allclose(by_kv_head(other.captured[layer][0], own), queries, atol=1e-2)


def test_random_queries_are_scaled_by_the_query_norm_of_their_layer() -> None:
    """The first compacted layer is layer 1 of the model, and the second is layer 3."""
    reader = Reader(ENGINE, ContextPrompts())
    for place, layer in enumerate(GLOBAL):
        assert reader.query_norm(place) is model().model.layers[layer].self_attn.q_norm.weight


def test_windows_are_those_of_the_whole_context() -> None:
    """The last 12 tokens, for every way of compaction; they do not count as entries or bytes."""
    _, plain = plain_pass(model(), TEXTS[0])
    whole = ENGINE.compact(TEXTS[0], replace(BASE, policy="full"))
    assert whole.nbytes == len(GLOBAL) * TOKENS * 2 * (2 * 8 + 1) * 4
    for setting in ("attention", "parts", "on policy", "cartridge", "none"):
        of_windows = compacted(ENGINE, TEXTS, setting).of_windows
        assert of_windows is not None
        assert of_windows.seen == [TOKENS]
        assert list(of_windows.layers) == [0, 2]
        for layer, pair in of_windows.layers.items():
            slots = torch.arange(TOKENS - WINDOW, TOKENS) % WINDOW
            for ours, theirs in zip(pair, plain.captured[layer][1:], strict=True):
                torch.testing.assert_close(ours[:, :, slots], theirs[:, :, -WINDOW:], atol=1e-5, rtol=1e-5)


def test_training_brings_a_cartridge_closer_to_the_full_cache() -> None:
    """Also if layers with windows lie between trained entries and the loss."""
    reader, whole = Reader(ENGINE, about(TEXTS[2])), ENGINE.compact(TEXTS[0], replace(BASE, policy="full"))
    answers = ENGINE.generate([TEXTS[2]], SamplingConfig(12, n=8, seed=9), whole)
    conversations = [Conversation(TEXTS[2], r.completion_ids) for r in answers]
    cartridge = Cartridge(beginning(whole, 16, 2, 3), 5)
    full = logprobs(reader, whole, conversations).detach()
    loss = divergence(full, logprobs(reader, cartridge.context(), conversations))
    for gradient in torch.autograd.grad(loss, cartridge.parameters()):
        assert bool((gradient.flatten(2).abs().amax(-1) > 0).all())
    settings = CartridgeConfig(steps=40, batch=8)
    config = replace(BASE, policy="cartridge", study_samples=16, study_tokens=12, cartridge=settings)
    trained = ENGINE.compact(TEXTS[0], config, about(TEXTS[2]))
    with torch.no_grad():
        after = divergence(full, logprobs(reader, trained, conversations))
    assert float(after) < float(loss.detach()) / 2


@pytest.mark.parametrize(("family", "kinds"), [("qwen3", KINDS), ("gemma3_text", ["full_attention"] * 4)])
def test_parts_are_not_read_alone(family: str, kinds: list[str]) -> None:
    """The windows would not be the text's, and keys of several kinds of RoPE cannot be moved: one model for each."""
    model = windowed_model(family, layer_types=kinds, use_sliding_window=True)
    engine = make_engine("hf", model=model, policy="full")
    with pytest.raises(UserError, match="sliding windows or several kinds of RoPE, so keys cannot be moved") as caught:
        engine.compact(TEXTS[0], replace(BASE, chunk=17, chunking="text"))
    assert caught.value.key == "chunking"
    assert "\n" not in str(caught.value)


def test_contexts_of_other_windows_are_refused() -> None:
    """Models with as many global layers, but with other windows, or without any, cannot continue the context."""
    context = replace(ENGINE.compact(TEXTS[0], BASE), model=replace(ENGINE.identity, fingerprint=""))
    without_windows = new_model("gemma3_text", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    for other in (windowed_model(sliding_window=13), without_windows):
        with pytest.raises(UserError, match="the context is of another model: sliding windows") as caught:
            make_engine("hf", model=other, policy="full").generate([[5]], SAMPLING, context)
        assert "\n" not in str(caught.value)
    without = replace(context, of_windows=None)
    with pytest.raises(UserError, match="the context is of another model: sliding windows"):
        ENGINE.generate([[5]], SAMPLING, without)


def test_a_prefilled_prompt_after_a_context_forks() -> None:
    """Each prompt is read as alone. The last queries are those of global layers, counted from 0."""
    context = ENGINE.compact(TEXTS[0], BASE)
    whole = ENGINE.prefill(TEXTS[1:], context)
    fork = whole.fork([2, 0, 2])
    assert torch.equal(fork.hidden, whole.hidden[[2, 0, 2]])
    assert fork.cache.seen == [TOKENS + 25, TOKENS + 1, TOKENS + 25]
    assert isinstance(fork.cache, type(whole.cache))
    assert fork.cache.of_windows.seen == fork.cache.seen
    parts = fork.cache.of_policy, fork.cache.of_windows
    assert fork.cache.allocated_bytes() == sum(part.allocated_bytes() for part in parts)
    fork.cache.begin_decode([True, False, True], torch.device("cpu"))
    assert fork.cache.of_windows.seen == fork.cache.seen == [TOKENS + 26, TOKENS + 1, TOKENS + 26]
    for place, text in enumerate(TEXTS[1:]):
        torch.testing.assert_close(ENGINE.prefill([text], context).hidden[0], whole.hidden[place], atol=1e-5, rtol=1e-5)


def test_last_queries_are_those_of_the_global_layers() -> None:
    """The policy's cache keeps the queries of layer 1, the first layer without a window, as those of its layer 0."""
    prefilled = make_engine("hf", model=model(), policy=policy_of("gkv", budget=80, window=4)).prefill([TEXTS[0]])
    _, plain = plain_pass(model(), TEXTS[0])
    for place, layer in enumerate(GLOBAL):
        wanted = plain.captured[layer][0][:, :, -4:].roll(len(TEXTS[0]) % 4, dims=2)  # position p is in slot p % 4
        torch.testing.assert_close(prefilled.cache.of_policy.layers[place].queries, wanted, atol=1e-5, rtol=1e-5)


def test_head_budgets_count_global_layers(tmp_path: Path) -> None:
    """A file of head budgets has the shares of 2 layers, not of 4, and `sensitivity` measures as many curves."""
    (tmp_path / "b.json").write_text(json.dumps({"shares": [[0.1, 0.2], [0.4, 0.1]]}))
    config = replace(BASE, budgets=str(tmp_path / "b.json"))
    context = ENGINE.compact(TEXTS[0], config)
    assert ((context.evict_at() > TOKENS).sum(-1) - 5).tolist() == [[8, 16], [33, 8]]
    (r,) = ENGINE.generate(TEXTS[2:3], SAMPLING, context)
    assert gap([plain_logprobs_after(model(), context, r)], [r]) <= 1e-5
    (tmp_path / "b.json").write_text(json.dumps({"shares": [[0.1, 0.2]] * 4}))
    with pytest.raises(UserError, match=r"\[4, 2\], but the model"):
        ENGINE.compact(TEXTS[0], config)
    curves = sensitivity([ENGINE.study(TEXTS[0], BASE)], BASE, lambda number, kept: float(kept.entries), ratios=(0, 1))
    assert curves.shape == (2, 2, 2)


# ---- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [*REPLAYED, "parts of own queries"])
@pytest.mark.few(3)
def test_continuations_are_replayed(setting: str) -> None:
    """By replay and by the dense reference, with the same gradients. Controls: wrong windows."""
    changed = {"chunk": 20, "queries": ["context"]} if setting == "parts of own queries" else {}
    context = compacted(ENGINE, TEXTS, "attention" if changed else setting, **changed)
    rollouts = ENGINE.generate(TEXTS[1:], SAMPLING, context)
    ours = replay_logprobs(model(), rollouts)
    dense = [dense_logprobs(model(), r.prompt_ids, r.completion_ids, r.trace) for r in rollouts]
    assert gap(ours, rollouts) <= 1e-5
    assert gap(dense, rollouts) <= 1e-5
    replayed, by_dense = (gradients(model(), weighted_sum(rows)) for rows in (ours, dense))
    model().zero_grad()
    assert (replayed - by_dense).norm() <= 1e-4 * by_dense.norm()
    for name, wrong in wrong_windows(rollouts).items():
        if name in ("window + 1", "window - 1", "windows as global layers"):
            assert trainer_gap(model(), wrong) >= 0.1, name


def test_other_continuations_are_refused() -> None:
    rollouts = ENGINE.generate(TEXTS[1:], SAMPLING, ENGINE.compact(TEXTS[0], BASE))
    assert rollouts[0].trace.windows == WINDOWS
    with pytest.raises(TraceError, match="no view replays traces with the sections evict_at, compacted_at"):
        replay_logprobs(model(), rollouts)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, TOKENS])
@pytest.mark.parametrize("setting", ["attention", "evict", "context", "global"])
@pytest.mark.few(4)
def test_a_loaded_context_equals_the_saved_one(setting: str, length: int, tmp_path: Path) -> None:
    """Bit for bit, also if the context is shorter than the window. The version of the format is 3."""
    texts = [TEXTS[0][:length], *TEXTS[1:]]
    context = compacted(ENGINE, texts, setting)
    save_context(tmp_path / "context", context)
    loaded = load_context(tmp_path / "context")
    assert (loaded.tokens, loaded.fitted, loaded.seconds) == (context.tokens, context.fitted, context.seconds)
    for ours, theirs in zip(loaded.layers, context.layers, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert loaded.of_windows is not None
    assert context.of_windows is not None
    assert (loaded.of_windows.sizes, loaded.of_windows.seen) == (WINDOWS, [length])
    assert loaded.of_windows.layers.keys() == context.of_windows.layers.keys()
    for layer, pair in loaded.of_windows.layers.items():
        assert all(map(torch.equal, pair, context.of_windows.layers[layer]))
    ours, theirs = (ENGINE.generate(texts[1:], SAMPLING, c) for c in (loaded, context))
    assert outcome(ours) == outcome(theirs)
    with safe_open(tmp_path / "context", "pt") as file:
        assert file.metadata()["format_version"] == "3"
        assert json.loads(file.metadata()["windows"]) == WINDOWS


def test_contexts_without_windows_keep_the_format_of_version_2(tmp_path: Path) -> None:
    """A file of version 2 loads. Its windows are None. A file of version 4 is refused."""
    engine, (tokens,) = make_engine("hf", model=model_of("qwen3"), policy="full"), prompts_of("qwen3", [TOKENS])
    save_context(tmp_path / "context", engine.compact(tokens, BASE))
    with safe_open(tmp_path / "context", "pt") as file:
        assert file.metadata()["format_version"] == "2"
        assert "windows" not in file.metadata()
        assert not [name for name in file.keys() if name.startswith("windows")]  # noqa: SIM118
    assert load_context(tmp_path / "context").of_windows is None
    tensors, metadata = read_sealed(tmp_path / "context", "a context", "sparse_rl.context", ["2"], "compact again")
    written = {key: value for key, value in metadata.items() if key not in ("sha256", "format", "format_version")}
    write_sealed(tmp_path / "other", tensors, format="sparse_rl.context", format_version="4", **written)
    with pytest.raises(UserError, match="version"):
        load_context(tmp_path / "other")
