"""TriAttention: its decisions are those of the slow reference, its centres those of the queries before RoPE, and its
score is the attention logit of future queries, in each family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from feeding import Batch, feed, lengths_around, ragged_batch, small_parameters
from policy_cases import UNCALIBRATED
from references import NEVER, REFERENCES, Disagreement
from test_policy_exactness import compare
from tiny import centred, model_of, new_model, prompts_of

from rollout import make_engine
from sparse_rl.attention.families import FAMILIES, HYBRID, global_layers
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.views import map_of_model
from sparse_rl.errors import UserError
from sparse_rl.methods.triattention.config import ATTACHED_AS
from sparse_rl.methods.triattention.policy import Centres, Listener, TriAttention, measure_centres, pairs, turned
from sparse_rl.policies import Entries, make_policy

NAME = "triattention"
SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e4},
    "linear": {"factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"factor": 4.0, "rope_theta": 1e4},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5},
        "original_max_position_embeddings": 512,
    },
}


def made_up(seed: int, heads: int, dim: int) -> tuple[dict[str, Any], Centres]:
    """Return parameters of the reference, queries and frequencies, and their statistics."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randn(heads, 1, dim, generator=generator)
    queries = shift + torch.randn(heads, 12, dim, generator=generator)
    frequency = 0.5 ** torch.arange(dim // 2)
    centres = Centres(queries.mean(1)[None], pairs(queries).abs().mean(1)[None], frequency[None])
    return {"queries": queries.tolist(), "frequencies": frequency.tolist()}, centres


@pytest.mark.parametrize("changed", [{}, {"sinks": 2}, {"window": 0}, {"horizon": 1}, {"horizon": 100}])
@pytest.mark.parametrize("period", [1, 8])
def test_decisions_equal_those_of_the_reference(period: int, changed: dict[str, Any], tally: Callable) -> None:
    """Controls: references with one other property disagree."""
    parameters = small_parameters(NAME, period=period, **changed)
    given, centres = made_up(period, heads=4, dim=8)
    prompts, totals = lengths_around(12, period)
    batch = ragged_batch(period, prompts, totals)
    fed = feed(make_policy(NAME, **parameters).with_centres(centres), batch)
    tally(NAME, *compare(NAME, parameters | given, batch, fed))
    assert any(bool((record < NEVER).any()) for record in fed.records)
    others = {
        "horizon": {"horizon": 8},
        "frequencies": {"frequencies": [1.1 * w for w in given["frequencies"]]},
        "heads": {"queries": given["queries"][::-1]},
        "concentration": {"queries": [[[sum(x) / 12 for x in zip(*q, strict=True)]] for q in given["queries"]]},
    }
    query, key, _ = batch.row(4)
    for name, other in others.items():
        with pytest.raises(Disagreement):
            REFERENCES[NAME](query, key, prompts[4], batch.scaling, parameters | given | other, fed.records[4]).run()
            pytest.fail(name)


def attended(model: Any, ids: list[int], positions: Any) -> list[tuple[torch.Tensor, ...]]:
    """Return query, key and value, after RoPE, of each layer without a sliding window."""
    heard: dict[int, tuple[torch.Tensor, ...]] = {}
    view = map_of_model(Listener(lambda *_: None), model.config, torch.tensor([len(ids)]), len(ids))
    view.observe = lambda layer, query, key, value, scaling: heard.__setitem__(layer, (query, key, value))
    adopt(model)
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([list(positions)])}
        model.get_decoder()(**inputs, attention_mask=NO_MASK, kv_view=view, use_cache=False)
    return [heard[layer] for layer in global_layers(model.config)]


@pytest.mark.parametrize("name", ["quickstart", "stories260K"])
@pytest.mark.few(1)
def test_decisions_of_trained_models_equal_those_of_the_reference(name: str, tally: Callable) -> None:
    """The centres are measured on one text, and used on two others."""
    model = model_of(name)
    (calibration,), texts = prompts_of(name, (150,), seed=9), prompts_of(name, (64, 64), seed=1)
    centres, own = measure_centres(model, calibration), attended(model, calibration, range(150))
    read = [attended(model, text, range(64)) for text in texts]
    parameters = {"budget": 24, "window": 4, "period": 8}
    policy = make_policy(NAME, **parameters).with_centres(centres)
    for layer in range(len(own)):
        frequency = centres.frequency[layer].double()
        back = turned(-torch.arange(150)[:, None] * frequency)
        unturned = pairs(own[layer][0][0].double()) * back
        given = {"queries": torch.cat([unturned.real, unturned.imag], -1).tolist(), "frequencies": frequency.tolist()}
        tensors = (torch.cat(rows) for rows in zip(*(one[layer] for one in read), strict=True))
        batch = Batch(*tensors, [8, 40], [64, 64])
        fed = feed(OneLayer(policy, layer), batch)
        tally(NAME, *compare(NAME, parameters | given, batch, fed))


class OneLayer(TriAttention):
    """The policy in a cache of one layer of the model."""

    def __init__(self, policy: TriAttention, layer: int) -> None:
        super().__init__(policy.config)
        only = slice(layer, layer + 1)
        bound = self.with_centres(Centres(*(value[only] for value in vars(policy.centres).values())))
        vars(self).update(vars(bound))


@pytest.mark.parametrize("kind", SCALED)
def test_centres_are_those_of_the_queries_before_rope(kind: str) -> None:
    """A scaled RoPE may multiply all queries by a factor. Control: queries after RoPE have other centres."""
    model = new_model("llama", rope_parameters={"rope_type": kind, **SCALED[kind]})
    (text,) = prompts_of("llama", (300,))
    caught: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, inputs, out: caught.append(out[0].double()))
    after = [query[0] for query, *_ in attended(model, text, range(300))]
    expected = [q.unflatten(-1, (-1, 8)).transpose(0, 1) * model.model.rotary_emb.attention_scaling for q in caught]
    centres = measure_centres(model, text)
    for layer, queries in enumerate(expected):
        torch.testing.assert_close(centres.centre[layer].double(), queries.mean(1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(centres.size[layer].double(), pairs(queries).abs().mean(1), atol=1e-5, rtol=1e-4)
        assert (centres.centre[layer] - after[layer].mean(1)).abs().max() > 1e-2


def test_frequencies_are_the_closest_of_those_that_the_model_has() -> None:
    """The model has others that are within the tolerance. Control: turned by one of these, it has that one."""
    model = new_model("llama")
    rotary, last = model.model.rotary_emb, model.config.max_position_embeddings - 1
    own = rotary.inv_freq
    del rotary.inv_freq
    for name, factor in (("far_", 1 + 0.1 / last), ("near_", 1 + 0.05 / last), ("", 1.0)):
        rotary.register_buffer(f"{name}inv_freq", factor * own.double(), persistent=False)
    for turning in (rotary.inv_freq, rotary.far_inv_freq):
        rotary.inv_freq = turning
        measured = measure_centres(model, list(range(3, 60))).frequency
        assert torch.equal(measured, turning.float().expand_as(measured))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNCALIBRATED])
def test_the_score_is_the_logit_of_future_queries_that_equal_the_centre(family: str) -> None:
    """In a text of one repeated token all queries are equal before RoPE, and so are all keys.

    Control: the logits of queries one position earlier differ.
    """
    model, seen, horizon = new_model(family), 24, 64
    token, future = [7], [seen + 2**n for n in range(7)]
    centres = measure_centres(model, token * 50)
    policy = make_policy(NAME, budget=8, horizon=horizon).with_centres(centres)
    layers = attended(model, token * (seen + 7), [*range(seen), *future])
    earlier = attended(model, token * (seen + 7), [*range(seen), *(position - 1 for position in future)])
    for layer, (query, key, _) in enumerate(layers):
        heads, kept = key.shape[1], key[:, :, :seen]
        positions = torch.arange(seen).expand(1, heads, seen)
        entries = Entries(kept, None, positions, torch.tensor([seen]), torch.tensor([seen]), None, 1.0, {})
        score = policy.score(layer, entries)
        for asking, differs in ((query, False), (earlier[layer][0], True)):
            grouped = asking[:, :, seen:].double().mean(2).unflatten(1, (heads, -1))  # [1, Hkv, G, D]
            logits = grouped @ kept.double().transpose(-1, -2)
            standard = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, correction=0, keepdim=True)
            error = float((standard.amax(2) - score).abs().max())
            assert (error > 0.05) if differs else (error < 1e-3), (layer, error)


@pytest.mark.parametrize("family", [family for family in UNCALIBRATED if family not in HYBRID])
def test_families_with_another_rope_are_refused(family: str) -> None:
    model = new_model(family)
    with pytest.raises(UserError, match=f"triattention has no score for a model of type {family}: .* RoPE is "):
        measure_centres(model, list(range(3, 60)))
    with pytest.raises(UserError, match="the policy triattention needs"):
        make_engine("hf", model=model, policy=make_policy(NAME, budget=8))


def test_heads_of_another_rank_have_their_own_centres() -> None:
    """Under tensor parallelism, a rank has some kv heads, and scores them as if they were all."""
    model = centred("qwen3")
    policy = make_policy(NAME, budget=8).bound_to(model)
    (text,) = prompts_of("qwen3", (60,))
    key, places = attended(model, text, range(60))[1][1], torch.arange(60).expand(1, 2, 60)

    def entries(part: slice) -> Entries:
        lengths = torch.tensor([60])
        return Entries(key[:, part], None, places[:, part], lengths, lengths, None, 1.0, {})

    whole = policy.score(1, entries(slice(0, 2)))
    for head in (0, 1):
        own = policy.with_centres(getattr(model, ATTACHED_AS).of_heads(slice(2 * head, 2 * head + 2)))
        assert torch.equal(own.score(1, entries(slice(head, head + 1))), whole[:, head : head + 1])
    assert not torch.equal(whole[:, 0], whole[:, 1])
