"""`HFEngine.logprobs` reads given completions after a compacted context in large pieces. The log-probs equal those of
`simulate`, which decodes token by token.
"""

from __future__ import annotations

import math

import pytest
import torch
from continued import engine_of
from judging import gap
from tiny import new_model, prompts_of

from rollout import SamplingConfig, make_engine
from rollout.context import ContextCache, PromptCacheConfig
from rollout.engine import least_rows
from rollout.hf import HFEngine
from rollout.sampling import NotFiniteLogprobError
from sparse_rl.errors import UserError

MODELS = ["quickstart", "stories260K", "qwen2", "qwen3", "llama"]
SETTINGS = [{"policy": "full"}, {"ratio": 0.3}, {"ratio": 0.3, "policy": "evict"}, {"policy": "none"}]
LENGTHS = (1, 30, 9, 2, 13)


@pytest.mark.parametrize(("piece", "max_batch"), [(8, 64), (1024, 2)])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(2)
def test_log_probs_equal_those_of_simulate(
    name: str, settings: dict, max_batch: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all sizes of batches and pieces. Control: the other end of each completion has other log-probs."""
    engine, (tokens, *questions) = engine_of(name, max_batch=max_batch), prompts_of(name, [60, 1, 7, 4, 12, 7])
    context = engine.compact(tokens, PromptCacheConfig(first=2, **settings))
    sampled = engine.generate(questions, SamplingConfig(max(LENGTHS), seed=1, ignore_eos=True), context)
    completions = [r.completion_ids[:n] for r, n in zip(sampled, LENGTHS, strict=True)]
    simulated = engine.simulate(questions, completions, context=context)
    monkeypatch.setattr(ContextCache, "piece", piece)
    logprobs = engine.logprobs(questions, completions, context)
    assert [len(row) for row in logprobs] == list(LENGTHS)
    assert all(row.dtype == torch.float32 for row in logprobs)
    assert gap(logprobs, simulated) <= 1e-5
    others = engine.logprobs(questions, [completion[::-1] for completion in completions], context)
    assert gap(others, simulated) > 0.1


def test_other_contexts_give_other_log_probs() -> None:
    """They nearly agree if all entries are kept."""
    engine, (tokens, question) = engine_of("quickstart"), prompts_of("quickstart", [60, 7])
    configs = [PromptCacheConfig(policy="full"), PromptCacheConfig(ratio=1.0, policy="evict"), PromptCacheConfig()]
    full, kept, small = (engine.compact(tokens, config) for config in configs)
    rollouts = engine.generate([question], SamplingConfig(20, seed=1, ignore_eos=True), full)
    answers = [rollouts[0].completion_ids]
    assert gap(engine.logprobs([question], answers, full), rollouts) <= 1e-5
    assert gap(engine.logprobs([question], answers, kept), rollouts) <= 1e-5
    assert gap(engine.logprobs([question], answers, small), rollouts) > 0.1


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_logits_need_no_more_memory_than_in_sampling(max_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most max_batch or 4 rows of logits at a time; a pass reads at most a piece, or 4 tokens per sequence."""
    engine, (tokens, *questions) = engine_of("qwen3", max_batch=max_batch), prompts_of("qwen3", [60, 5, 7, 3, 9])
    context = engine.compact(tokens, PromptCacheConfig(ratio=0.2))
    rows: list[int] = []
    read: list[int] = []
    logits, hidden = HFEngine._logits, HFEngine._hidden

    def counted_logits(self: HFEngine, states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return logits(self, states)

    def counted_hidden(self: HFEngine, ids: torch.Tensor, *more: object) -> torch.Tensor:
        read.append(ids.numel())
        return hidden(self, ids, *more)

    monkeypatch.setattr(HFEngine, "_logits", counted_logits)
    monkeypatch.setattr(HFEngine, "_hidden", counted_hidden)
    monkeypatch.setattr(ContextCache, "piece", 16)
    engine.logprobs(questions, [[*range(3, 53)]] * 4, context)
    assert sum(rows) == 4 * 50
    assert max(rows) <= max(least_rows("cpu"), max_batch)
    assert max(read) <= 16


def test_mistakes_are_refused() -> None:
    engine, (tokens, question) = engine_of("qwen3"), prompts_of("qwen3", [60, 5])
    context = engine.compact(tokens, PromptCacheConfig())
    for prompts, completions, message in (
        ([question], [[]], "completion 0 is empty"),
        ([[]], [[3]], "prompt 0 is empty"),
        ([question], [], "1 prompts but 0 completions"),
        ([question], [[10**6]], "completion 0 has token 1000000"),
    ):
        with pytest.raises(UserError, match=message):
            engine.logprobs(prompts, completions, context)
    other = make_engine("hf", model=new_model("qwen3", num_hidden_layers=7), policy="full")
    with pytest.raises(UserError, match="the context is of another model"):
        other.logprobs([question], [[3]], context)
    assert engine.logprobs([], [], context) == []


def test_a_log_prob_that_is_not_finite_is_an_error() -> None:
    """The error names the sequence that reads the token with a NaN embedding; a last token is never read."""
    model = new_model("qwen3")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = math.nan
    engine = make_engine("hf", model=model, policy="full")
    context = engine.compact([3, 4, 5, 6, 7, 8, 10, 11], PromptCacheConfig(ratio=0.5))
    with pytest.raises(NotFiniteLogprobError) as error:
        engine.logprobs([[3, 4], [5, 6]], [[7, 8, 10], [7, 9, 8]], context)
    assert (error.value.prompt, error.value.sample, error.value.dtype) == (1, 0, "float32")
    (row,) = engine.logprobs([[5, 6]], [[7, 8, 9]], context)
    assert bool(row.isfinite().all())
