"""The cache's tensors shrink, and hold exactly the entries that the record names. A *frozen* row has ended while other
rows of the batch go on; its entries do not change.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from policy_cases import BOUNDED, EVICTING, SAMPLED
from tiny import model_of, policy_of, prompts_of
from transformers import PreTrainedModel

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.interface import NO_MASK
from sparse_rl.policies import Policy
from sparse_rl.policies.cache import GROW, EvictingCache

CPU = torch.device("cpu")
BUDGET, PERIOD = 16, 5


def entry_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one token's keys and values in float32, over all layers and kv heads."""
    layers, kv_heads, dim = cache_shape(model.config)
    return 2 * 4 * layers * kv_heads * dim


class Driver:
    """Feeds given tokens to a model with an EvictingCache, as the engine does."""

    def __init__(self, model: PreTrainedModel, policy: Policy, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.cache = model, EvictingCache(policy)
        width = max(map(len, prompts))
        self.cache.begin_prefill([len(p) for p in prompts], CPU)
        self._forward(torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts]), torch.arange(width)[None])

    def decode(self, tokens: Sequence[int], active: Sequence[bool] | None = None) -> None:
        self.cache.begin_decode([True] * len(tokens) if active is None else active, CPU)
        self._forward(torch.tensor(tokens)[:, None], torch.tensor(self.cache.seen)[:, None] - 1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        with torch.no_grad():
            self.model.get_decoder()(
                input_ids=ids, position_ids=positions, attention_mask=NO_MASK, kv_view=self.cache, use_cache=False
            )


@pytest.mark.parametrize("policy_name", SAMPLED)
def test_the_prefill_frees_the_memory_of_evicted_entries(policy_name: str) -> None:
    """The storage is that of the kept entries: the budget in each row, or 300 entries with the full cache."""
    model = model_of("qwen3")
    policy = policy_of(policy_name, budget=BUDGET, window=4, period=PERIOD)
    cache = Driver(model, policy, prompts_of("qwen3", [300, 120])).cache
    kept_entries = 300 if policy_name == "full" else policy.schedule.left(300, 300)
    assert kept_entries == BUDGET or policy_name not in BOUNDED
    assert cache.allocated_bytes() == 2 * kept_entries * entry_bytes(model)


@pytest.mark.parametrize("policy_name", BOUNDED)
@pytest.mark.few(3)
def test_memory_in_decoding_is_bounded_by_the_peak(policy_name: str) -> None:
    """Exactly the policy's peak per sequence, for completions of 25 and 50 tokens. Control: the full cache grows."""
    model, prompts = model_of("qwen3"), prompts_of("qwen3", [90, 40, 3, 17])

    def peak(policy: Policy, tokens: int) -> int:
        engine = make_engine("hf", model=model, policy=policy)
        engine.generate(prompts, SamplingConfig(max_tokens=tokens, seed=0, ignore_eos=True))
        return engine.peak_cache_bytes

    policy = policy_of(policy_name, budget=BUDGET, window=4, period=PERIOD)
    assert policy.schedule.peak is not None
    bound = len(prompts) * policy.schedule.peak * entry_bytes(model)
    assert policy.schedule.peak <= BUDGET + PERIOD
    assert peak(policy, 25) == peak(policy, 50) == bound
    if policy_name == BOUNDED[0]:
        full = policy_of("full")  # control: the full cache grows, in steps of GROW entries
        assert peak(full, 25 + GROW) > peak(full, 25) > len(prompts) * 90 * entry_bytes(model) > 4 * bound


@pytest.mark.parametrize("policy_name", SAMPLED)
def test_the_cache_holds_the_recorded_entries(policy_name: str) -> None:
    """After every step, exactly the positions that the next query may see by the record."""
    policy = policy_of(policy_name, budget=BUDGET, window=4, period=PERIOD)
    driver = Driver(model_of("qwen3"), policy, prompts_of("qwen3", [33, 18, 2, 21]))
    cache = driver.cache
    for step in range(30):
        for row, seen in enumerate(cache.seen):
            assert cache.lengths[row] == policy.schedule.held(cache.prompt_lengths[row], seen)
            record = cache.evict_at(row, seen)
            for index, layer in cache.layers.items():
                for head, positions in enumerate(layer.positions[row, :, : cache.lengths[row]]):
                    visible = (record[index, head] > seen).nonzero()[:, 0]
                    assert positions.tolist() == visible.tolist(), (step, row, index, head)
        driver.decode([(7 * step + row) % 60 + 3 for row in range(4)])
    if policy_name != "full":  # control: every row has evicted tokens
        assert all((cache.evict_at(row, seen) <= seen).any(-1).all() for row, seen in enumerate(cache.seen))


@pytest.mark.parametrize("policy_name", EVICTING)
def test_a_frozen_row_keeps_its_entries(policy_name: str) -> None:
    """Bit for bit, with its record. Control: those of the active row 2 change."""
    policy = policy_of(policy_name, budget=BUDGET, window=4, period=PERIOD)
    driver = Driver(model_of("qwen3"), policy, prompts_of("qwen3", [20, 19, 30]))
    cache = driver.cache
    for step in range(3):
        driver.decode([3 + step, 4, 5])

    def snapshot(row: int) -> list[torch.Tensor]:
        kept_entries, seen = cache.lengths[row], cache.seen[row]
        layers = cache.layers.values()
        entries = [t[row, :, :kept_entries] for layer in layers for t in (layer.keys, layer.values, layer.positions)]
        return [t.clone() for t in [*entries, cache.evict_at(row, seen)]]

    frozen, active = snapshot(1), snapshot(2)
    for step in range(12):
        driver.decode([6 + step, 60, 9 + step], active=[True, False, True])
    assert all(torch.equal(a, b) for a, b in zip(frozen, snapshot(1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(active, snapshot(2), strict=True))


def test_forked_rows_are_independent() -> None:
    """`select([1, 0, 1])` copies row 1; each row then evicts as in a cache whose rows were prefilled separately."""
    policy = policy_of("gkv", budget=BUDGET, window=4, period=PERIOD)
    (a, b) = prompts_of("qwen3", [24, 9])
    forked, plain = Driver(model_of("qwen3"), policy, [a, b]), Driver(model_of("qwen3"), policy, [b, a, b])
    forked.cache.select([1, 0, 1])
    for step in range(20):
        tokens = [3 + step, 40 - step, 60 - step]
        forked.decode(tokens)
        plain.decode(tokens)
    for row in range(3):
        ours, theirs = (d.cache.evict_at(row, d.cache.seen[row]) for d in (forked, plain))
        assert torch.equal(ours, theirs)
    keys = forked.cache.layers[0].keys
    assert not torch.equal(keys[0], keys[2])
