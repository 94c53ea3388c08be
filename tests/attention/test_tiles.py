"""FlexAttention visits tiles of 128 queries by 128 keys. The lists of tiles to visit, which are computed from evict_at,
equal those of torch's create_block_mask, which looks at every pair. A listed tile is "full" if all its pairs are
visible, else "partial". With sorted keys (kernel flex_sorted), keys are sorted by evict_at within segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from policy_cases import SAMPLED
from tiny import model_of, policy_of, prompts_of
from torch.nn.attention.flex_attention import _transpose_ordered, create_block_mask
from traces import trace_of

from rollout import make_engine
from sparse_rl.kernels import running_topk
from sparse_rl.kernels.flex import (
    TILE,
    Tiles,
    block_mask,
    make_tiles,
    padded,
    segment_of,
    tiles_bytes,
    visible_share,
)
from sparse_rl.trace import EvictionTrace, batch_traces, pack_traces

LAYOUTS = ("alone", "right", "left", "packed")
SEEDS = 45  # per layout: 180 random cases in total, and 4 per policy
BY_QUERY = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
BY_KEY = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def laid_out(traces: Sequence[EvictionTrace], layout: str) -> torch.Tensor:
    """Return one layer's evict_at as rows int32 [R, S] for the layout."""
    lengths = list(map(len, traces))
    width = max(lengths)
    if layout == "packed":
        return batch_traces([pack_traces(traces)], [0], sum(lengths) + 7)["evict_at"][0].flatten(0, 1)
    if layout == "alone":
        return traces[0].evict_at[0]
    starts = [width - n if layout == "left" else 0 for n in lengths]
    return batch_traces(traces, starts, width)["evict_at"][0].flatten(0, 1)


def visible(evict_at: torch.Tensor, width: int) -> torch.Tensor:
    """Return the pairs visible by the definition as bool [R, query, key]; after its last token a row has no query."""
    truth = torch.zeros(len(evict_at), width, width, dtype=torch.bool)
    for row, ends in enumerate(evict_at.tolist()):
        last = max((t for t, end in enumerate(ends) if end > t), default=-1)
        for t, end in enumerate(ends):
            truth[row, t : min(end, last + 1), t] = True
    return truth


def of_torch(truth: torch.Tensor, length: int) -> Tiles:
    """Return torch's lists for the visible pairs `truth`, bool [R, query, key]."""
    return create_block_mask(
        lambda row, _, q, t: truth[row, q, t], len(truth), None, length, length, device="cpu", BLOCK_SIZE=TILE
    )


def check_natural(evict_at: torch.Tensor) -> None:
    """Check every list, by queries and by keys, against torch's, for the padded square and for the length itself."""
    length, width = evict_at.shape[-1], padded(evict_at.shape[-1])
    width += TILE * (length % 3 == 0)  # more padding than needed
    tiles, truth = make_tiles(evict_at, width), visible(evict_at, width)
    ours = block_mask(tiles.position, tiles.evict_at, *tiles.lists)
    theirs = of_torch(truth, width)
    for name in BY_QUERY + BY_KEY:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    if width - length < TILE:
        exact = of_torch(truth, length)
        for name in BY_QUERY:
            assert torch.equal(getattr(ours, name), getattr(exact, name)), name


def check_sorted(evict_at: torch.Tensor, segment: int) -> None:
    """Every visible pair is in a visited tile, full tiles hold only visible pairs, unneeded visits are in the own
    segment. The lists by keys are those by queries, transposed."""
    length = evict_at.shape[-1]
    width = -(-padded(length) // segment) * segment
    tiles, truth = make_tiles(evict_at, width, segment), visible(evict_at, width)
    places, order = torch.arange(width).expand(len(evict_at), -1), tiles.position.long()
    assert torch.equal(order.sort(-1).values, places)
    assert torch.equal(order // segment, places // segment)
    assert torch.equal(order.gather(-1, tiles.order[1]), places)
    assert torch.equal(tiles.order[0], order.clamp(max=length - 1))
    assert tiles.nbytes == tiles_bytes(len(evict_at), width)
    moved = truth.gather(-1, order[:, None].expand(-1, width, -1))
    blocks = moved.unfold(1, TILE, TILE).unfold(2, TILE, TILE)  # [R, n, n, TILE, TILE]
    of_torch_by_key = [_transpose_ordered(*tiles.lists[i : i + 2]) for i in (0, 2)]
    for ours, theirs in zip(tiles.lists[4:], sum(of_torch_by_key, ()), strict=True):
        assert torch.equal(ours, theirs)
    partial, full = (dense(*tiles.lists[i : i + 2]) for i in (0, 2))
    any_visible, all_visible = blocks.flatten(3).any(-1), blocks.flatten(3).all(-1)
    assert not (partial & full).any()
    assert not (any_visible & ~(partial | full)).any()
    assert not (full & ~all_visible).any()
    own = torch.arange(width // TILE) * TILE // segment
    assert not ((partial & ~any_visible) & (own[:, None] != own)).any()


def dense(count: torch.Tensor, listed_tiles: torch.Tensor) -> torch.Tensor:
    """Return the lists of tiles as bool [R, n, n], where n is the number of tiles along the sequence."""
    size = listed_tiles.shape[-1]
    result = torch.zeros(len(listed_tiles), size, size, dtype=torch.bool)
    for row, (counts, listed) in enumerate(zip(count[:, 0].tolist(), listed_tiles[:, 0].tolist(), strict=True)):
        for q, (n, keys) in enumerate(zip(counts, listed, strict=True)):
            result[row, q, keys[:n]] = True
    return result


def random_lengths(seed: int) -> list[int]:
    """Return two random lengths; seed 0 gives lengths that fill whole tiles."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 421, (2,), generator=generator).tolist() if seed else [256, 128]


def short_lived(trace: EvictionTrace) -> EvictionTrace:
    """Return a trace in which tokens live for at most 40 steps, so that tiles are empty; the first 9 stay for ever."""
    position = torch.arange(len(trace))
    evict_at = position + 1 + (trace.evict_at - position) % 40
    evict_at[..., :9] = 1 << 30
    return EvictionTrace.recorded(evict_at)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.few(2)
def test_tiles_equal_create_block_mask(layout: str) -> None:
    """For random evictions, the lists equal torch's; with sorted keys they list all visible pairs (`check_sorted`)."""
    for seed in range(SEEDS):
        traces = [trace_of(n, layers=1, seed=seed) for n in random_lengths(seed)]
        if seed % 3 == 0:
            traces = [short_lived(trace) for trace in traces]
        evict_at = laid_out(traces, layout)
        check_natural(evict_at)
        check_sorted(evict_at, 256)


@pytest.mark.parametrize("end", [1, 127, 128, 129, 255, 256, 257, 383, 384])
def test_tiles_are_right_if_a_whole_tile_is_evicted_at_the_edge_of_another(end: int) -> None:
    """The first 128 keys are all evicted at query `end`, at or next to the first query of a tile."""
    evict_at = torch.full((1, 384), 384, dtype=torch.int32)
    evict_at[0, :128] = end
    check_natural(evict_at)
    check_sorted(evict_at, 128)


@pytest.mark.parametrize("policy", SAMPLED)
@pytest.mark.few(2)
def test_tiles_are_right_under_every_policy(policy: str) -> None:
    """As recorded by the engine `hf`. One prompt is longer than the budget of 64."""
    cache_policy = policy_of(policy, budget=64, window=8, period=16)
    engine = make_engine("hf", model=model_of("qwen3"), policy=cache_policy)
    prompts, completions = prompts_of("qwen3", (100, 7)), prompts_of("qwen3", (200, 150), seed=1)
    traces = [EvictionTrace(r.trace.evict_at) for r in engine.simulate(prompts, completions)]
    assert (policy == "full") == all(t.retention() == 1 for t in traces)
    for layout in LAYOUTS:
        evict_at = laid_out(traces, layout)
        check_natural(evict_at)
        check_sorted(evict_at, 128)


@pytest.mark.parametrize("scores", ["uniform", "recency"])
def test_tiles_are_right_under_a_learned_policy(scores: str) -> None:
    """A learned policy keeps a running top-k, which evicts one token at a time."""
    evict_at = scattered(scores, 700, 300)
    assert visible_share(evict_at) < 0.4
    check_natural(evict_at)
    check_sorted(evict_at, 256)


def test_control_lists_for_other_evictions_differ() -> None:
    """The first 128 keys go at query 100, every key by 300, or every key lives for 128 queries more."""
    evict_at = short_lived(trace_of(400, layers=1)).evict_at[0]
    truth = visible(evict_at, 512)
    another_eviction = evict_at.clone()
    another_eviction[0, :128] = 100
    theirs = of_torch(truth, 512)
    for wrong_evictions in (another_eviction, evict_at.clamp(max=300), evict_at + 128):
        ours = make_tiles(wrong_evictions, 512)
        assert any(not torch.equal(a, getattr(theirs, name)) for a, name in zip(ours.lists[:4], BY_QUERY, strict=True))


def test_padding_visits_no_tile() -> None:
    """Each row visits as many tiles as alone. A batch of padding alone visits none."""
    lengths = (700, 129, 128, 1)
    traces = [trace_of(n, layers=1) for n in lengths]
    for segment in (None, 256):

        def count(tiles: Tiles) -> torch.Tensor:
            return tiles.counts[:2].sum((0, 2)).view(-1, 2)

        together = make_tiles(laid_out(traces, "right"), 1536, segment)
        alone = [make_tiles(t.evict_at[0], -(-len(t) // 256) * 256, segment) for t in traces]
        assert torch.equal(count(together), torch.cat([count(tiles) for tiles in alone]))
    only_padding = make_tiles(torch.zeros(2, 300, dtype=torch.int32), 384)
    assert only_padding.visited == 0


def test_no_tile_mixes_packed_documents() -> None:
    """Documents that fill whole tiles visit as many tiles packed as separately."""
    traces = [trace_of(n, layers=1) for n in (256, 384, 128)]
    packed = make_tiles(pack_traces(traces).evict_at[0], 768)
    apart = [make_tiles(t.evict_at[0], len(t)) for t in traces]
    counted = [int(t.counts[:2].sum()) for t in (packed, *apart)]
    assert counted[0] == sum(counted[1:])


def scattered(scores: str, length: int, budget: int) -> torch.Tensor:
    """Return evict_at [2, S] of a running top-k, with or without scores that favour recent tokens."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, 2, length, generator=generator)
    if scores == "recency":
        drawn = drawn + torch.arange(length) / budget
    return running_topk(drawn, 4, window=256, k=budget - 260).evict_at[0]


@pytest.mark.parametrize("scores", ["uniform", "recency"])
@pytest.mark.parametrize(("length", "most"), [(16384, 0.19), (32768, 0.12)])
def test_sorted_tiles_are_close_to_the_visible_pairs(scores: str, length: int, most: float) -> None:
    """At most `most`; in natural order the share is over 1.3 times `most`."""
    evict_at = scattered(scores, length, 2048)
    natural, ordered = (make_tiles(evict_at, length, segment).visited for segment in (None, segment_of(length)))
    assert visible_share(evict_at) < ordered <= most < 1.3 * most < natural


@pytest.mark.parametrize("length", [1, 127, 128, 129, 512, 513, 1000, 4096, 4097, 16384, 20000])
def test_padded_lengths_are_few_multiples_of_a_tile(length: int) -> None:
    """Two between two powers of two, so that few graphs are compiled."""
    width = padded(length)
    assert width % TILE == 0
    assert length <= width <= max(length + TILE - 1, 1.5 * length)
    sizes = {padded(n) for n in range(2**13 + 1, 2**14 + 1)}
    assert sizes == {12288, 16384}


@pytest.mark.parametrize("width", [300, 128])
def test_a_width_that_does_not_fit_is_refused(width: int) -> None:
    with pytest.raises(AssertionError, match=rf"^width {width}: not a multiple of 128, or below 200 tokens"):
        make_tiles(torch.zeros(1, 200, dtype=torch.int32), width)
