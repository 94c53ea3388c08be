"""Rows with branches: the log-probs and gradients of a row for each turn, with fewer tokens."""

from __future__ import annotations

import pytest
import torch

from rollout import SamplingConfig, make_engine
from rollout.turns import Conversation, sample_turns
from sparse_rl.attention import replay_logprobs
from sparse_rl.attention.branches import branched_rows
from sparse_rl.attention.interface import NO_MASK
from sparse_rl.kernels.flex import TILE, make_tiles
from sparse_rl.trace import EvictionTrace, TraceError

GKV = {"policy": "gkv", "budget": 10, "window": 3, "period": 4}
POLICIES = [GKV, {"policy": "streaming", "sinks": 1, "budget": 8, "period": 3}, {"policy": "full"}]


def sampled(model, policy, turns=(3, 1, 2)):
    """Return conversations with these numbers of turns, whose turns were prefilled."""
    engine = make_engine("hf", model=model, policy=policy)
    conversations = [Conversation([5 + row, 9, 11, 4][: 4 - row % 2], kept=False) for row in range(len(turns))]
    for turn in range(max(turns)):
        going = [c for c, count in zip(conversations, turns, strict=True) if turn < count]
        read = [[20 + turn + i for i in range(3 + row)] if turn else [] for row in range(len(going))]
        limits = [9 + 2 * row + turn for row in range(len(going))]
        sample_turns(engine, going, read, limits, SamplingConfig(32, seed=3, ignore_eos=True))
    return conversations


def branch_logprobs(model, conversations, kernel, changed=lambda trace: trace):
    """Return the log-probs of all sampled tokens of each conversation, from rows with branches."""
    turns = [[(prompt, changed(trace)) for prompt, trace in c.traces()] for c in conversations]
    rows = branched_rows(turns, "cpu", kernel)
    ids = torch.zeros_like(rows.tokens)
    for row, conversation in enumerate(conversations):
        ids[row] = torch.tensor(conversation.tokens)[rows.tokens[row]]
    out = model(input_ids=ids, position_ids=rows.tokens, attention_mask=NO_MASK, kv_view=rows.view, use_cache=False)
    scored = out.logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return [own[sampled[1:]] for own, sampled in zip(scored, rows.scored, strict=True)], rows


def gap(scored, recorded):
    return float((torch.cat(scored).detach() - torch.cat(recorded)).abs().max())


def gradient(model, logprobs):
    loss = torch.cat([x * torch.arange(1.0, 1 + len(x)).cos() for x in logprobs]).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["policy"])
def test_branches_have_the_log_probs_and_gradients_of_rows_per_turn(family, policy, new_model):
    model = new_model(family, initializer_range=0.2)
    conversations = sampled(model, policy)
    reference = gradient(model, [torch.cat(list(replay_logprobs(model, c.rollouts))) for c in conversations])
    recorded = [torch.cat([torch.tensor(turn.model_logprobs) for turn in c.rollouts]) for c in conversations]
    for kernel in ("gather", "sdpa", "dense"):
        scored, rows = branch_logprobs(model, conversations, kernel)
        assert gap(scored, recorded) <= 1e-5
        assert float((gradient(model, scored) - reference).norm() / reference.norm()) <= 2e-6
    with torch.no_grad():  # on a CPU, FlexAttention has no gradients
        for kernel in ("flex", "flex_sorted"):
            scored, _ = branch_logprobs(model, conversations, kernel)
            assert gap(scored, recorded) <= 1e-5
    assert rows.tokens.numel() < 3 * sum(len(c.rollouts[-1].trace) for c in conversations)
    if policy["policy"] != "full":
        later = [lambda t: moved(t, 1), lambda t: moved(t, -1), EvictionTrace.dense_like]  # controls
        for change in later:
            scored, _ = branch_logprobs(model, conversations, "gather", change)
            assert gap(scored, recorded) > 1e-3


def moved(trace: EvictionTrace, by: int) -> EvictionTrace:
    evict_at = trace.evict_at.clone()
    evict_at[trace.global_layers] += by * (evict_at[trace.global_layers] < len(trace)).int()
    return EvictionTrace(evict_at, trace.further, validate=False)


def test_tiles_of_earlier_queries_are_not_visited():
    evict_at = torch.full((2, 4 * TILE), 2**30, dtype=torch.int32)
    whole, late = make_tiles(evict_at, 4 * TILE), make_tiles(evict_at, 4 * TILE, before=2 * TILE + 5)
    assert late.counts[:2, :, :2].sum() == 0 < whole.counts[:2, :, :2].sum()
    assert torch.equal(late.counts[:2, :, 2:], whole.counts[:2, :, 2:])


def test_more_than_evictions_is_refused(new_model):
    model = new_model("qwen3", initializer_range=0.2)
    (conversation,) = sampled(model, {"policy": "am", "budget": 8, "window": 3, "period": 4}, turns=(2,))
    with pytest.raises(TraceError, match="replayed from evictions alone, but the traces have"):
        branched_rows([conversation.traces()], "cpu")
