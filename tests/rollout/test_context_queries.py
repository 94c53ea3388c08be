"""Reference queries of one-shot compaction: each kind, and their parts of a long context, against separate readings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from continued import check_continuation, engine_of, stories
from tiny import prompts_of

from rollout import SamplingConfig
from rollout.context import Context, ContextCache, PromptCacheConfig
from rollout.context.cache import LayerEntries
from rollout.context.reader import ContextPrompts, after_thinking, questions_in
from sparse_rl.errors import UserError

TOKENS, LAYERS, HEADS, GROUP, DIM = 60, 5, 4, 2, 8
WHOLE = PromptCacheConfig(policy="full")


def queries_after(engine: Any, context: Context, text: list[int], layer: int) -> torch.Tensor:
    """Return the queries of a text's tokens after a context in one layer, [1, Hkv, G x number of tokens, D]."""
    cache = ContextCache(context, captures=True)
    engine._read([text], cache)
    return cache.captured(layer)[:, :, : len(text)].reshape(1, HEADS, -1, DIM)


def split_by(separator: int, answer: list[int]) -> list[list[int]]:
    """Return the parts of an answer before and after the first token `separator`, as two prompts."""
    place = answer.index(separator)
    return [answer[: place + 1], answer[place + 1 :]]


@pytest.mark.parametrize("instructed", [False, True])
def test_a_repetition_follows_its_instruction(instructed: bool) -> None:
    """Queries of the instruction, if any, and of the tokens between the first 2 and last 3, after the context."""
    engine, tokens, instruction, _ = stories(5, 4)
    config = PromptCacheConfig(queries=["repeat"], first=2, last=3)
    prompts = ContextPrompts(repeat=instruction) if instructed else None
    studied = engine.study(tokens, config, prompts)
    text = [*(instruction if instructed else []), *tokens[2:57]]
    for layer in range(LAYERS):
        again = queries_after(engine, engine.compact(tokens, WHOLE), text, layer)
        torch.testing.assert_close(studied.queries[layer], again, atol=1e-5, rtol=0)
    assert studied.queries[0].shape == (1, HEADS, GROUP * len(text), DIM)


def test_self_study_is_a_conversation_of_two_instances() -> None:
    """One answers the request for questions, split into starters; another answers each starter. All their tokens give
    queries; `question` has the first starter's."""
    engine, tokens, request, ask = stories(5, 4)
    whole = engine.compact(tokens, WHOLE)
    (written,) = engine.generate([ask], SamplingConfig(9, seed=3), whole)
    separator = written.completion_ids[4]
    prompts = ContextPrompts(
        requests=[request], questions=ask, starters=lambda answer: split_by(separator, list(answer))
    )
    config = PromptCacheConfig(queries=["self_study"], study_samples=2, study_tokens=9, seed=3)
    studied = engine.study(tokens, config, prompts)
    starters = [request, *split_by(separator, written.completion_ids)]
    answers = engine.generate(starters, SamplingConfig(9, n=2, seed=3), whole)
    texts = [[*r.prompt_ids[TOKENS:], *r.completion_ids] for r in answers]
    assert [text[: len(starters[n // 2])] for n, text in enumerate(texts)] == [starters[n // 2] for n in range(6)]
    for layer in range(LAYERS):
        separate = [queries_after(engine, whole, text, layer).unflatten(2, (GROUP, -1)) for text in texts]
        expected = torch.cat(separate, dim=3).flatten(2, 3)
        torch.testing.assert_close(studied.queries[layer], expected, atol=1e-5, rtol=0)
    asked = engine.study(tokens, replace(config, queries=["question"]), prompts)
    expected = queries_after(engine, whole, starters[1], 4)
    torch.testing.assert_close(asked.queries[4], expected, atol=1e-5, rtol=0)


def test_random_queries_have_the_scale_of_the_models_query_norm() -> None:
    """Without a query norm, they have the mean norm of the context's queries."""
    for name in ("qwen3", "stories260K"):
        engine, (tokens,) = engine_of(name), prompts_of(name, [TOKENS])
        plain, scaled, own = (
            engine.study(tokens, PromptCacheConfig(queries=[kind])).queries
            for kind in ("random_plain", "random", "context")
        )
        for layer, (a, b, c) in enumerate(zip(plain, scaled, own, strict=True)):
            assert a.shape == b.shape == c.shape
            if name == "qwen3":
                weight = engine.model.get_decoder().layers[layer].self_attn.q_norm.weight
                assert torch.equal(b, a * weight)
            else:
                torch.testing.assert_close(b.norm(dim=-1).mean(-1), c.norm(dim=-1).mean(-1))
                torch.testing.assert_close(b / b.norm(dim=-1, keepdim=True), a / a.norm(dim=-1, keepdim=True))
        assert abs(float(torch.cat(plain, 1).std()) - 1) < 0.05


# ---- parts of a long context ----------------------------------------------------------------------------------------

PARTS = [(2, 20), (20, 38), (38, 57)]  # three parts of the 55 tokens between the first 2 and the last 3
CONFIG = PromptCacheConfig(ratio=0.3, first=2, last=3, chunks=3)


def part_of(tokens: list[int], whole: Context, start: int, end: int) -> Context:
    """Return the entries of the first 2 tokens, of a part and of the last 3 tokens, as a context of 60 tokens."""
    places = [0, 1, *range(start, end), 57, 58, 59]
    return Context(tokens, [LayerEntries(*(x[:, :, places] for x in layer)) for layer in whole.layers], False)


@pytest.mark.parametrize("kind", ["repeat", "self_study", "question", "context", "window"])
@pytest.mark.few(2)
def test_each_part_has_queries_of_its_own(kind: str) -> None:
    """They see the first tokens, the part and the last tokens, at the context's positions. Control: those of all
    entries."""
    engine, tokens, request, ask = stories(5, 4)
    whole = engine.compact(tokens, WHOLE)
    prompts = ContextPrompts(requests=[request], questions=ask, starters=lambda answer: [list(answer)])
    config = replace(CONFIG, queries=[kind], study_tokens=6, window=7)
    studied = engine.study(tokens, config, prompts)
    own = engine.study(tokens, PromptCacheConfig(queries=["context"])).queries
    assert [(part.start + 2, part.end + 2) for part, _ in studied.parts] == PARTS
    for (start, end), (_, of_part) in zip(PARTS, studied.parts, strict=True):
        seen = part_of(tokens, whole, start, end)
        places = [0, 1, *range(start, end), 57, 58, 59]
        if kind in ("context", "window"):
            places = places if kind == "context" else places[-7:]
            for ours, theirs in zip(of_part.queries, own, strict=True):
                assert torch.equal(ours, theirs.unflatten(2, (GROUP, TOKENS))[:, :, :, places].flatten(2, 3))
            continue
        (written,) = engine.generate([ask], SamplingConfig(6, seed=0), seen)
        texts = [written.completion_ids]
        if kind == "repeat":
            texts = [tokens[start:end]]
        if kind == "self_study":
            answers = engine.generate([request, written.completion_ids], SamplingConfig(6, seed=0), seen)
            texts = [[*r.prompt_ids[TOKENS:], *r.completion_ids] for r in answers]
        for context, equal in ((seen, True), (whole, False)):
            separate = [queries_after(engine, context, text, 3).unflatten(2, (GROUP, -1)) for text in texts]
            expected = torch.cat(separate, dim=3).flatten(2, 3)
            assert (float((of_part.queries[3] - expected).abs().max()) <= 1e-5) == equal


@pytest.mark.parametrize(
    "changed",
    [{}, {"select": "omp"}, {"policy": "evict"}, {"policy": "evict", "heads": "global"}, {"on_policy": True}],
    ids=str,
)
@pytest.mark.few(2)
def test_each_part_is_compacted_alone(changed: dict) -> None:
    """The first and the last tokens stay once. Continuations have the log-probs of a slow reference."""
    engine, tokens, question, _ = stories(5, 4)
    config = replace(CONFIG, **changed)
    studied = engine.study(tokens, config)
    context = studied.compacted(config)
    kept = context.evict_at() > TOKENS
    assert bool(kept[:, :, [0, 1, 57, 58, 59]].all())
    total = 0
    for (start, end), (part, of_part) in zip(PARTS, studied.parts, strict=True):
        share = part.share(config.kept(TOKENS))
        alone = of_part.compacted(config, [[share] * HEADS] * LAYERS)
        assert torch.equal((alone.evict_at() > TOKENS)[:, :, start:end], kept[:, :, start:end])
        assert int(kept[:, :, start:end].sum()) == share * HEADS * LAYERS
        total += share
    assert total == config.kept(TOKENS) == round(0.3 * 55)
    check_continuation(engine, context, question)


# ---- texts ----------------------------------------------------------------------------------------------------------


def test_questions_are_read_line_by_line() -> None:
    for text, expected in (
        ("Q1: Who came?", ["Who came?"]),
        ("Who came?\nWhen?\n\nWhy?\nHow?", ["Who came?", "When?", "Why?"]),
        ("1. Who came?\n2) When?\n- Why 3 times?", ["Who came?", "When?", "Why 3 times?"]),
        ("---\n  \n* Who?", ["Who?"]),
        ("3 men came. Who?", ["3 men came. Who?"]),
        ("Here are three questions:\n\n**Who came?**\n2: When?", ["Who came?", "When?"]),
        ("3.5 million people came. Who?\n1939: who came?", ["3.5 million people came. Who?", "1939: who came?"]),
        ("Say who came.\nSay when.", ["Say who came.", "Say when."]),
        ("", []),
    ):
        assert questions_in(text) == expected


def test_thinking_is_no_part_of_a_text() -> None:
    assert after_thinking("<think>a\nb</think>\n\nc") == "\n\nc"
    assert after_thinking("a</think>b") == "b"
    assert after_thinking("<think>a") == ""
    assert after_thinking("a") == "a"


def test_a_question_that_is_not_written_is_refused() -> None:
    engine, tokens, _, ask = stories(5, 4)
    for prompts in (ContextPrompts(), ContextPrompts(questions=ask)):
        with pytest.raises(UserError, match="the model wrote no question about the context within 5 tokens") as caught:
            engine.study(tokens, PromptCacheConfig(queries=["question"], study_tokens=5), prompts)
        assert caught.value.key == "queries"
