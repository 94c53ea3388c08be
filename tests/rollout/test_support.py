"""The law of truncated draws: among the recorded support, the trainer gives each drawn token the sampler's log-prob.

Controls (judging.py): with another step's support, with all tokens, or with one token less, the gap is large.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from judging import check_support_law, support_gaps, supports_of, with_supports
from policy_cases import SAMPLED
from tiny import TRAINED, model_of, policy_of, prompts_of

from rollout import Rollout, SamplingConfig, make_engine
from rollout.config import Origin
from rollout.files import RolloutFiles, written_rollouts
from rollout.sampling import sample
from rollout.verify import verify
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import make_view
from sparse_rl.trace import EvictionTrace, Supports, TraceError, batch_traces, load_traces, pack_traces, save_traces
from sparse_rl.trace.sections import SUPPORT
from sparse_rl.trace.support import HELD, SupportRecord, packed

CUTS = [{"top_p": 0.9}, {"top_p": 0.95}, {"top_k": 5}, {"top_k": 5, "top_p": 0.95}, {"min_p": 0.05}]
MODELS = ["qwen3", "granite", "qwen3_moe", "gemma3_text", "quickstart", "stories260K"]
V = 64  # of the tiny models and of the quickstart's


def sampled(name: str, policy: str = "gkv", tokens: int = 40, n: int = 2, **cut: float) -> list[Rollout]:
    cache = policy_of(policy, budget=20, window=4, period=8)
    sampling = SamplingConfig(tokens, n=n, seed=0, ignore_eos=True, record_support=True, **cut)
    return make_engine("hf", model=model_of(name), policy=cache).generate(prompts_of(name, (20, 45, 7)), sampling)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(3)
def test_log_probs_among_the_supports_are_the_samplers(name, cut, temperature, tally):
    """Granite divides its logits by 3, so a small min_p keeps all. With top-k supports are ids, else mostly bits."""
    trained, cut = name in TRAINED, {"min_p": 0.6} if name == "granite" and "min_p" in cut else cut
    rollouts = sampled(name, tokens=100 if trained else 40, n=4 if trained else 2, temperature=temperature, **cut)
    tally("gkv", gap=check_support_law(model_of(name), rollouts, temperature, trained))


@pytest.mark.parametrize("policy", SAMPLED)
@pytest.mark.parametrize("name", ["quickstart", "qwen3_moe", "gemma3_text"])
@pytest.mark.few(2)
def test_the_law_holds_under_every_policy(name, policy, tally):
    trained = name in TRAINED
    rollouts = sampled(name, policy, 100 if trained else 30, 4 if trained else 1, top_p=0.95)
    tally(policy, gap=check_support_law(model_of(name), rollouts, 1.0, trained))


def test_a_support_is_what_the_sampler_could_have_drawn():
    """It equals the tokens that top-k and top-p keep of the trainer's own logits, in float32 and without a near tie."""
    rollouts = sampled("qwen3", top_k=7, top_p=0.9)
    for r in rollouts:
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])
        view = make_view([r.trace], [0], ids.shape[1], "cpu")
        with torch.no_grad():
            logits = model_of("qwen3")(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits[0]
        for row, support in zip(logits[len(r.prompt_ids) - 1 : -1], supports_of(r, V), strict=True):
            best = row.sort(descending=True).indices[:7]
            chances = row[best].softmax(-1)
            assert support == sorted(best[: int((chances.cumsum(-1) - chances < 0.9).sum())].tolist())


@pytest.mark.parametrize("name", ["qwen3", "stories260K"])
def test_in_bfloat16_ranks_lose_the_drawn_token_but_the_record_does_not(name):
    """The set of the same size, made from the trainer's own ranks, lacks a drawn token: its log-prob would be -inf."""
    model = adopt(copy.deepcopy(model_of(name)).bfloat16())
    engine = make_engine("hf", model=model, policy=policy_of("gkv", budget=32, window=8, period=8))
    sampling = SamplingConfig(100, n=8, seed=0, ignore_eos=True, record_support=True, top_k=5)
    rollouts, lost, differ = engine.generate(prompts_of(name, (20, 45, 7)), sampling), 0, 0
    for r in rollouts:
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])
        view = make_view([r.trace], [0], ids.shape[1], "cpu")
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits[0].float()
        ranked = logits[len(r.prompt_ids) - 1 : -1].sort(descending=True, stable=True).indices[:, :5].tolist()
        lost += sum(token not in best for token, best in zip(r.completion_ids, ranked, strict=True))
        differ += sum({*a} != {*b} for a, b in zip(ranked, supports_of(r, model.config.vocab_size), strict=True))
    assert lost > 0
    assert differ > 5 * lost
    assert support_gaps(model, rollouts, 1.0)[1] < 0.6  # a bound of this dtype, where -inf would be infinitely far


def test_nothing_is_recorded_unless_tokens_are_drawn_from_fewer():
    """Not for greedy sampling, given completions, no truncation, or without the flag."""
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy_of("gkv", budget=20, window=4, period=8))
    prompts = prompts_of("qwen3", (9, 4))
    for setting in ({"record_support": True}, {"top_k": 3}, {"record_support": True, "temperature": 0, "top_k": 3}):
        rollouts = engine.generate(prompts, SamplingConfig(8, seed=0, ignore_eos=True, **setting))
        assert not any(r.trace.further for r in rollouts)
    assert not any(r.trace.further for r in engine.simulate(prompts, [r.completion_ids for r in rollouts]))


def test_a_forced_token_has_no_support(tmp_path):
    """Its log-prob is that over the whole vocabulary. The others are sampled from their supports. Files of both are
    right. Controls: a drawn token without its support, and one from outside its support."""
    engine = make_engine("hf", model=model_of("qwen3"), policy=policy_of("gkv", budget=20, window=4, period=8))
    settings = {"top_k": 3, "forced": (5, 6, 7), "forced_from": 4}
    sampling = SamplingConfig(10, seed=0, ignore_eos=True, record_support=True, **settings)
    rollouts = engine.generate(prompts_of("qwen3", (9, 4)), sampling)
    for r in rollouts:
        sizes = r.trace.further["support_sizes"]
        assert sizes.tolist() == [0] * len(r.prompt_ids) + [3] * 4 + [0] * 3 + [3] * 3
        supports = Supports.of([r.trace], V)
        assert supports.tokens.tolist() == [len(r.prompt_ids) + i for i in (0, 1, 2, 3, 7, 8, 9)]
        with torch.no_grad():
            (whole, kept) = replay_logprobs(model_of("qwen3"), [r], truncated=True)[0].T
        assert torch.equal(whole[4:7], kept[4:7])
        assert bool((whole < kept)[[*range(4), *range(7, 10)]].all())
        assert r.logprobs[4:7] == r.model_logprobs[4:7]
    settings = {"vocabulary": V, "dtype": "float32", "exact": True, "evicts": True, "made_by": {"policy": "gkv"}}
    origin = Origin(model="qwen3", engine="hf", sampling=sampling, **settings)

    def beyond(*some: Rollout) -> int:
        with written_rollouts(tmp_path, origin) as add:
            add(some, [{}] * len(some))
        return sum(gap.beyond for _, gap in verify(model_of("qwen3"), RolloutFiles(tmp_path, origin), 1e-5))

    assert beyond(*rollouts) == 0
    sizes, ids, bits = (rollouts[0].trace.further[name] for name in SUPPORT)
    sizes = sizes.index_fill(0, torch.tensor(len(sizes) - 1), 0)
    bare = rollouts[0].trace.beside(dict(zip(SUPPORT, (sizes, ids, bits[:-1]), strict=True)))
    assert beyond(replace(rollouts[0], trace=bare)) == 1
    outside = min({*range(V)} - {*supports_of(rollouts[0], V)[0]})
    with pytest.raises(TraceError, match="1 sampled tokens are not in the supports that they were drawn from"):
        replace(rollouts[0], completion_ids=[outside, *rollouts[0].completion_ids[1:]])


def test_supports_of_a_batch_are_those_of_its_rows():
    """Mixed ids and bits, with more steps than are held on the device, and a step that is recorded again."""
    generator, size, rows = torch.Generator().manual_seed(0), 100, 3  # W is 4
    record, expected = SupportRecord(), [[] for _ in range(rows)]
    for step in range(2 * HELD + 3):
        share = torch.tensor([0.01, 0.05, 0.6])[torch.randperm(3, generator=generator)]
        kept = torch.rand(rows, size, generator=generator) < share[:, None]
        kept[:, step] = True
        if step == 5:
            record.draw([(row, step) for row in range(rows)], packed(~kept))  # then computed again
        record.draw([(row, step) for row in range(rows)], packed(kept))
        for row in range(rows):
            expected[row].append(kept[row].nonzero()[:, 0].tolist())
    traces = []
    for row in range(rows):
        length = len(expected[row]) + 2 + row
        traces.append(EvictionTrace.dense(1, 1, length).beside(record.take(row, length)))
    assert record.take(0, 9) == {}
    assert {len(ids) > 4 for row in expected for ids in row} == {True, False}
    supports = Supports.of(traces, size)
    assert supports.ids.dtype == torch.int32
    assert [ids.tolist() for ids in supports.ids.split(supports.sizes.tolist())] == [i for row in expected for i in row]
    assert torch.equal(supports.draws, torch.arange(len(supports.sizes)).repeat_interleave(supports.sizes))
    places = [(row, 2 + row + step) for row in range(rows) for step in range(len(expected[row]))]
    assert list(zip(supports.rows.tolist(), supports.tokens.tolist(), strict=True)) == places
    again = Supports.of([pack_traces(traces[:1])], size)
    assert torch.equal(again.ids, supports.ids[: len(again.ids)])
    assert Supports.of([EvictionTrace.dense(1, 1, 5)], size) is None
    for wrong in (32, 128 + 1):
        with pytest.raises(TraceError, match="supports over 128 tokens do not fit a model with"):
            Supports.of(traces, wrong)
    with pytest.raises(TraceError, match="a support has a token id of 97 or more"):
        Supports.of(traces, 97)


def test_a_full_cache_would_have_drawn_from_the_same_supports(tmp_path):
    """`dense_like` keeps the supports, and so do files and batches."""
    (r, other, *_) = sampled("gemma3_text", top_p=0.9)
    dense = replace(r, trace=r.trace.dense_like())
    assert not torch.equal(dense.trace.evict_at, r.trace.evict_at)
    assert supports_of(dense, V) == supports_of(r, V)
    save_traces(tmp_path / "t.safetensors", [r.trace, other.trace])
    for loaded, trace in zip(load_traces(tmp_path / "t.safetensors"), (r.trace, other.trace), strict=True):
        assert loaded.sections.keys() == trace.sections.keys()
        assert all(torch.equal(loaded.sections[name], values) for name, values in trace.sections.items())
    batch = batch_traces([r.trace, other.trace], [0, 0], max(len(r.trace), len(other.trace)))
    assert batch["support_sizes"].sum() == sum(t.further["support_sizes"].sum() for t in (r.trace, other.trace))


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.9}], ids=["ids", "bits"])
def test_a_drawn_token_outside_its_support_is_refused(cut):
    (r, *_) = sampled("qwen3", **cut)
    supports = supports_of(r, V)
    for step in (0, len(supports) - 1):
        others = sorted({*supports[step], (r.completion_ids[step] + 1) % V} - {r.completion_ids[step]})
        changed = [*supports[:step], others, *supports[step + 1 :]]
        with pytest.raises(TraceError, match="1 sampled tokens are not in the supports that they were drawn from"):
            replace(r, trace=with_supports(r.trace, changed, V))
    for token in (-1, V, 10 * V):  # no token of the vocabulary of the supports
        with pytest.raises(TraceError, match="1 sampled tokens are not in the supports that they were drawn from"):
            replace(r, completion_ids=[token, *r.completion_ids[1:]])


def forged(trace: EvictionTrace, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**trace.further, name: values}


def test_forged_supports_are_refused_in_one_line():
    """See also test_trace_checks.py, which changes single numbers at random."""
    (small, *_), (wide, *_) = sampled("qwen3", top_k=2), sampled("qwen3", top_p=0.9)
    sizes, ids, _ = small.trace.further.values()
    bits, place, twice = (
        wide.trace.further["support_bits"],
        len(small.prompt_ids),
        torch.cat([ids[:1], ids[:1], ids[2:]]),
    )
    cases = [
        (small, "support", twice, "ids of one draw that do not ascend"),
        (small, "support", ids.view(-1, 2).flip(1).flatten(), "ids of one draw that do not ascend"),
        (small, "support", ids.masked_fill(torch.arange(len(ids)) == 1, V), "an id outside 0 to 63"),
        (small, "support", ids[:-1], "have 79 ids and 0 rows of bits, but support_sizes says 80 ids and 0"),
        (small, "support_sizes", sizes.roll(-1), "a support of a token of the prompt"),
        (small, "support_sizes", -sizes, "support_sizes has a number below 0"),
        (small, "support_sizes", sizes[1:], f"has {len(sizes) - 1} tokens, but the trace has {len(sizes)}"),
        (wide, "support_bits", bits.roll(1, 0), "support_bits has a row with more or fewer tokens than"),
        (wide, "support_bits", bits | 1 << 9, "support_bits has a row with more or fewer tokens than"),
        (wide, "support_bits", bits[1:], "39 rows of bits, but support_sizes says 0 ids and 40 rows"),
    ]
    assert place == 20
    for rollout, name, values, message in cases:
        with pytest.raises(TraceError, match=message) as caught:
            EvictionTrace(rollout.trace.evict_at, forged(rollout.trace, name, values)).check(place)
        assert "\n" not in str(caught.value)
    for name in ("support_sizes", "support", "support_bits"):
        rest = {key: values for key, values in small.trace.further.items() if key != name}
        with pytest.raises(TraceError, match=f"also needs {name}"):
            EvictionTrace(small.trace.evict_at, rest)


def test_the_supports_of_a_step_are_0_where_the_token_is_forced():
    logits, uniform = torch.randn(3, V), torch.rand(3, dtype=torch.float64)
    sampling = SamplingConfig(1, top_k=4, record_support=True)
    *_, bits = sample(logits, sampling, uniform, torch.tensor([-1, 7, -1]))
    assert [int(x) for x in (bits != 0).any(1)] == [1, 0, 1]
