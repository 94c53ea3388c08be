"""Layers with sliding windows in the hf engine: WindowCache equals attention under a plain mask, after any sequence of
forward passes, and sampling equals one plain forward pass over each text.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from judging import same, trainer_gap
from tiny import policy_of, prompts_of
from windowed import WINDOWS, model, plain_gap, windowed_model

from rollout import SamplingConfig, make_engine
from sparse_rl.attention import windows
from sparse_rl.attention.windows import WindowCache
from sparse_rl.kernels.exact import sdpa

CPU = torch.device("cpu")
KV_HEADS, GROUP, DIM, SCALING = 2, 2, 4, 0.7
LENGTHS = (1, 3, 11, 12, 13, 24, 25, 40)  # around the window of 12 tokens, and around twice the window


# ---- the cache alone ------------------------------------------------------------------------------------------------


class Rows:
    """A WindowCache beside the plain list of all keys and values of each row. Layer 0 has no window."""

    def __init__(self, window: int, seed: int) -> None:
        self.window, self.cache = window, WindowCache([0, window, window + 1])
        self.generator = torch.Generator().manual_seed(seed)
        self.texts: list[dict[int, list[torch.Tensor]]] = []  # of each row: layer -> keys and values of all tokens
        self.largest = 0.0  # the largest error so far

    def feed(self, counts: list[int], width: int) -> None:
        """Let `counts` tokens of each row arrive, right-padded to `width`, and compare the attention of each."""
        if len(self.texts) == 1 < len(counts):
            self.texts = [dict(self.texts[0]) for _ in counts]
        self.texts = self.texts or [{layer: [torch.zeros(KV_HEADS, 0, DIM)] * 2 for layer in (1, 2)} for _ in counts]
        self.cache.begin_prefill(counts, CPU)
        for layer in (1, 2):
            query = torch.randn(len(counts), KV_HEADS * GROUP, width, DIM, generator=self.generator)
            pair = [torch.randn(len(counts), KV_HEADS, width, DIM, generator=self.generator) for _ in range(2)]
            out = self.cache.attend(layer, query, *(x.clone() for x in pair), SCALING)
            for row, count in enumerate(counts):
                before = self.texts[row][layer][0].shape[1]
                text = [torch.cat([old, x[row, :, :count]], 1) for old, x in zip(self.texts[row][layer], pair)]  # noqa: B905
                self.texts[row] = {**self.texts[row], layer: text}
                for place in range(count):
                    expected = self.plain(layer, row, query[row, :, place], before + place)
                    self.largest = max(self.largest, float((out[row, :, place] - expected).abs().max()))

    def plain(self, layer: int, row: int, query: torch.Tensor, position: int) -> torch.Tensor:
        """Return the attention output [Hq, D] of one query at a position."""
        keys, values = (
            x[:, max(0, position - self.cache.sizes[layer] + 1) : position + 1].repeat_interleave(GROUP, dim=0)
            for x in self.texts[row][layer]
        )
        shares = ((keys * query[:, None]).sum(-1) * SCALING).softmax(-1)
        return (shares[..., None] * values).sum(1)

    def select(self, rows: list[int], fork: bool) -> None:
        if fork:
            self.cache = self.cache.fork(rows)
        else:
            self.cache.select(rows)
        self.texts = [self.texts[row] for row in rows]


@pytest.mark.parametrize("groups", ["one group", "small groups"])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 21, 400])
@pytest.mark.few(7)
def test_attention_equals_that_under_a_plain_mask(window: int, groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows arrive in random pieces and token by token, rest, are removed, repeated, forked and continued by several."""
    monkeypatch.setattr(windows, "GROW", 4)
    if groups == "small groups":  # queries of a piece attend one by one, or a few at a time
        monkeypatch.setattr(windows, "MOST_LOGITS", 200)
    for seed in range(12):
        rng, rows = random.Random(seed), Rows(window, seed)
        count = rng.choice([1, 1, 3])
        lengths = [rng.choice([1, window, window + 1, rng.randint(1, 2 * window + 3)]) for _ in range(count)]
        lengths = [min(length, 30) for length in lengths]
        rows.feed(lengths, max(lengths) + rng.randint(0, 3))
        for _ in range(rng.randint(4, 10)):
            count, step = len(rows.texts), rng.random()
            if step < 0.25:
                counts = [rng.randint(0, 12) for _ in range(rng.choice([count, count, 3 if count == 1 else count]))]
                rows.feed(counts, max(*counts, 2) + rng.randint(0, 2))
            elif step < 0.5:
                rows.select([rng.randrange(count) for _ in range(rng.randint(1, 4))], fork=rng.random() < 0.5)
            else:
                for _ in range(rng.randint(1, 9)):
                    rows.feed([rng.randint(0, 1) for _ in range(len(rows.texts))], 1)
        assert rows.largest <= 1e-5


def test_control_other_windows_give_other_attention() -> None:
    """The cache of a window of 5 tokens differs from masks of 4 and of 6 tokens."""
    for wrong in (4, 6):
        rows = Rows(5, 0)
        rows.cache.sizes = [0, wrong, wrong + 1]
        rows.feed([9], 9)
        rows.cache.sizes = [0, 5, 6]
        outs = Rows(5, 0)
        outs.plain = lambda layer, row, query, position: torch.zeros(KV_HEADS * GROUP, DIM)  # type: ignore[method-assign]
        outs.feed([9], 9)
        assert outs.largest > 0.1
        assert rows.largest <= 1e-5  # the reference reads the sizes of the cache


@pytest.mark.parametrize("length", [3, 5, 6, 11])
def test_a_fork_never_changes_the_cache_that_it_continues(length: int) -> None:
    """By one row, by several, or by one token; the same continuation gives the same output, bit for bit."""
    rows = Rows(5, 0)
    rows.feed([length], length)
    before = {layer: [x.clone() for x in pair] for layer, pair in rows.cache.layers.items()}

    def continued(forked: WindowCache, counts: list[int], width: int) -> torch.Tensor:
        outs, generator = [], torch.Generator().manual_seed(1)
        for number in (width, 1, 1, 1):
            forked.begin_prefill([min(count, number) for count in counts], CPU)
            shape = len(counts), KV_HEADS, number, DIM
            query = torch.randn(len(counts), KV_HEADS * GROUP, number, DIM, generator=generator)
            pair = (torch.randn(shape, generator=generator) for _ in range(2))
            outs.append(forked.attend(1, query, *pair, SCALING))
        return torch.cat(outs, dim=2)

    for counts, width in (([4], 4), ([1], 1), ([2, 0, 4], 4), ([1, 1], 1)):
        first, again = (continued(rows.cache.fork([0]), counts, width) for _ in range(2))
        assert torch.equal(first, again)
        assert rows.cache.seen == [length]
        for layer, pair in rows.cache.layers.items():
            assert all(map(torch.equal, pair, before[layer]))


def test_a_cache_has_no_more_slots_than_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are added in steps of GROW while tokens are decoded, and end at the window. A long text is cut at once."""
    monkeypatch.setattr(windows, "GROW", 4)
    rows, slots = Rows(10, 0), []
    rows.feed([3], 4)
    for _ in range(12):
        rows.feed([1], 1)
        slots.append(rows.cache.layers[1][0].shape[2])
    assert slots == [7, 7, 7, 7, *[10] * 8]
    long = Rows(10, 0)
    long.feed([33, 2], 33)
    assert long.cache.layers[1][0].shape[2] == 10
    # layers with windows of 10 and of 11 tokens, 2 rows; keys and values of 2 heads of 4 numbers of 4 bytes
    assert long.cache.allocated_bytes() == (10 + 11) * 2 * 2 * KV_HEADS * DIM * 4


@pytest.mark.parametrize(("window", "most"), [(5, 4000), (200, 30000), (3, 1)])
def test_groups_of_queries_bound_the_memory(window: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MOST_LOGITS logits, or one query, and no key that none of its queries sees, except slots of the cache."""
    sizes: list[int] = []

    def counting(query: torch.Tensor, key: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        sizes.append(query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2])
        assert sizes[-1] <= most or query.shape[2] == 1
        assert key.shape[2] <= 2 * window + query.shape[2]  # the larger window is window + 1
        return sdpa(query, key, *more, **options)

    rows = Rows(window, 0)
    rows.feed([9, 400], 400)
    monkeypatch.setattr(windows, "MOST_LOGITS", most)
    monkeypatch.setattr(windows, "sdpa", counting)
    rows.feed([300, 2], 300)
    assert len(sizes) > 4
    assert rows.largest <= 1e-5


def test_keys_have_the_dtype_of_values() -> None:
    """Under autocast, RoPE leaves keys in float32, while values are in bfloat16."""
    cache = WindowCache([3])
    for width in (5, 4, 1):
        cache.begin_prefill([width], CPU)
        query, key, value = (torch.randn(1, heads, width, DIM) for heads in (4, 2, 2))
        assert cache.attend(0, query, key, value.bfloat16(), SCALING).dtype == torch.bfloat16
        assert [x.dtype for x in cache.layers[0]] == [torch.bfloat16] * 2


# ---- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize("window", [1, 12, 300])
@pytest.mark.few(3)
def test_sampling_equals_one_plain_pass(window: int, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts shorter and longer than the window in one batch. Controls: a token more or less, or no window."""
    monkeypatch.setattr(windows, "GROW", 7)
    model, prompts = windowed_model(family, sliding_window=window), prompts_of(family, LENGTHS)
    engine = make_engine("hf", model=model, policy="full")
    sampled = engine.generate(prompts, SamplingConfig(30, seed=1, ignore_eos=True))
    lengths = [4] * 6 + [19, 30]  # the last two rows remain, and move to the first places
    completions = [r.completion_ids[:n] for r, n in zip(sampled, lengths, strict=True)]
    cut = engine.simulate(prompts, completions)
    assert plain_gap(model, sampled, [window, 0] * 2) <= 1e-5
    assert plain_gap(model, cut, [window, 0] * 2) <= 1e-5
    for wrong in {window - 1, window + 1, 0} if window < max(LENGTHS) else ():
        assert plain_gap(model, sampled, [wrong, 0] * 2) >= 0.1


@pytest.mark.parametrize("policy", ["full", "gkv", "streaming", "h2o"])
@pytest.mark.few(1)
def test_rows_do_not_depend_on_the_batch(policy: str) -> None:
    """Nor do traces and log-probs. All rows of a batch are replayed."""
    engine = make_engine("hf", model=model(), policy=policy_of(policy, budget=14, window=4, period=3, sinks=1))
    prompts, sampling = prompts_of("gemma3_text", LENGTHS), SamplingConfig(40, seed=3, n=2)
    together = engine.generate(prompts, sampling)
    assert len({len(r.completion_ids) for r in together}) > 4
    for place, prompt in enumerate(prompts):
        assert same(engine.generate([prompt], sampling), together[2 * place : 2 * place + 2])
    assert trainer_gap(model(), together) <= 1e-5
    assert all(r.trace.windows == WINDOWS for r in together)
