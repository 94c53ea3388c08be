"""KVpop's scorers, small networks that score the tokens of each kv head. Scores computed in chunks equal those of the
recurrence and of the paper's equations. A score depends on no token that comes after the score's use. Untrained
scorers rank by recency.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_rl.kernels import running_topk
from sparse_rl.methods.kvpop.scorers import MLSTM, SCORERS, Scorer, State, make_scorer
from sparse_rl.policies import make_policy

B, H, D = 2, 3, 8
MLSTMS: list[dict[str, Any]] = [
    {},
    {"features": "softmax"},
    {"value": "full", "skip": True},
    {"value": "cached", "norm": True},
    {"readout": "immediate"},
    {"softcap": 1.5, "norm": True, "skip": True},
    {"softcap": None},
]


def scorer(**options: Any) -> Any:
    torch.manual_seed(1)
    scorers = make_scorer(options, heads=H, dim=D)
    for weight in scorers.parameters():
        weight.data += 0.4 * torch.randn_like(weight)
    return scorers


def tokens(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, H, length, D, generator=generator) * 2, torch.randn(B, H, length, D, generator=generator)


def recurrent(model: MLSTM, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Compute the scores token by token, with a state of constant size."""
    x = torch.cat([key, value], dim=-1)
    parts, asks, computed = model.parts(x), model.asks(x), torch.zeros(x.shape[:3])
    state = State.empty((B, H), parts.key.shape[-1], parts.value.shape[-1])
    size = state.memory.numel()
    for q in range(x.shape[2]):
        state.write(parts.key[:, :, q], parts.value[:, :, q], parts.log_input[:, :, q], parts.log_forget[:, :, q])
        u = q - window if model.delayed else q
        if u >= 0:
            read = state.read(asks[:, :, u])
            computed[:, :, u] = model.rate(read[:, :, None], x[:, :, u : u + 1])[:, :, 0]
    assert state.memory.numel() == size
    return computed


@pytest.mark.parametrize("options", MLSTMS, ids=str)
@pytest.mark.parametrize(
    ("length", "window", "chunk"), [(150, 7, 64), (64, 1, 64), (65, 30, 16), (40, 39, 7), (9, 9, 4)]
)
def test_chunkwise_scores_equal_the_recurrence(options: dict, length: int, window: int, chunk: int) -> None:
    model = scorer(name="mlstm", chunk=chunk, **options)
    actual, _ = model(*tokens(length), window)
    expected = recurrent(model, *tokens(length), window)
    assert actual.shape == (B, H, length)
    assert (actual - expected).abs().max() <= 1e-5
    if window < length - 1:
        assert actual.std() > 0.01  # control: the scores differ between tokens


ALL_SCORERS = [{"name": name} for name in SCORERS if name != "mlstm"] + [
    {"name": "mlstm", **options} for options in MLSTMS
]


@torch.no_grad()
@pytest.mark.parametrize("options", ALL_SCORERS, ids=str)
@pytest.mark.parametrize("chunks", [[60], [25, 35], [1, 1, 1, 57], [30, 1, 29], [1] * 60], ids=str)
def test_scores_of_a_text_in_chunks_equal_those_of_the_whole_text(options: dict, chunks: list[int]) -> None:
    """By `follow`, as decoding does; with a delayed readout, the last window has no score yet."""
    model, window = scorer(**({"chunk": 16} if options["name"] == "mlstm" else {}), **options), 7
    key, value = tokens(60)
    x, delay = torch.cat([key, value], dim=-1), window if model.delayed else 0
    expected = model(key, value, window)[0][:, :, : 60 - delay]
    memory = {name: tensor.expand(B, *tensor.shape).clone() for name, tensor in model.memory().items()}
    results, start = [], 0
    for count in chunks:
        at = torch.arange(start, start + count)
        query_tokens = x[:, :, (at - delay).clamp(min=0)]
        given = None if count == 1 else torch.tensor([count] * B)
        results.append(model.follow(memory, x[:, :, at], query_tokens, (at - delay).expand(B, -1), given))
        start += count
    scores = torch.cat(results, dim=-1)[:, :, delay:]
    assert scores.shape == expected.shape
    assert (scores - expected).abs().max() <= 1e-5
    assert options["name"] == "recency" or expected.std() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("options", ALL_SCORERS, ids=str)
def test_padding_does_not_change_the_memory(options: dict) -> None:
    model = scorer(**({"chunk": 4} if options["name"] == "mlstm" else {}), **options)
    x = torch.cat(tokens(30), dim=-1)
    at = torch.arange(20).expand(B, -1)

    def start(rows: int) -> dict[str, torch.Tensor]:
        return {name: tensor.expand(rows, *tensor.shape).clone() for name, tensor in model.memory().items()}

    memory_of_both, alone = start(B), start(1)
    model.follow(memory_of_both, x[:, :, :20], x[:, :, :20], at, torch.tensor([20, 9]))
    model.follow(alone, x[1:, :, :9], x[1:, :, :9], at[:1, :9])
    for token in (20, 21):
        new = x[:, :, token : token + 1]
        together = model.follow(memory_of_both, new, new, torch.full((B, 1), token))
        by_itself = model.follow(alone, new[1:], new[1:], torch.full((1, 1), token))
        assert (together[1] - by_itself[0]).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("options", MLSTMS, ids=str)
def test_a_score_equals_the_papers_equations(options: dict) -> None:
    """A sum over all earlier tokens, in float64, without a state."""
    model, length, window = scorer(name="mlstm", **options), 24, 5
    x = torch.cat(tokens(length), dim=-1).double()
    query, key, gates, out = (weight.double() for weight in (model.query, model.key, model.gates, model.out))
    hedgehog = options.get("features", "hedgehog") == "hedgehog"
    cap = options.get("softcap", 15.0)

    def phi(y: torch.Tensor) -> torch.Tensor:
        return torch.cat([y.softmax(-1), (-y).softmax(-1)]) if hedgehog else y.softmax(-1)

    def capped(gate: torch.Tensor) -> torch.Tensor:
        return gate if cap is None else cap * (gate / cap).tanh()

    result = model(*tokens(length), window)[0]
    for b in range(B):
        for h in range(H):
            gate = x[b, h] @ gates[h]
            log_input, log_forget = capped(gate[:, 0]), capped(gate[:, 1] + model.forget_bias[h].double())
            log_forget = -(1 + (-log_forget).exp()).log()
            value = x[b, h, :, D:] if model.value is None else x[b, h] @ model.value[h].double()
            for u in range(length - window):
                q = u if options.get("readout") == "immediate" else u + window
                phi_query = phi(x[b, h, u] @ query[h])
                gains = [(log_input[j] + log_forget[j + 1 : q + 1].sum()).exp() for j in range(q + 1)]
                weight = [float(g * (phi_query @ phi(x[b, h, j] @ key[h]))) for j, g in enumerate(gains)]
                read = sum(w * v for w, v in zip(weight, value[: q + 1], strict=True)) / sum(weight)
                if options.get("skip"):
                    read = read + x[b, h, u] @ model.skip[h].double()
                if options.get("norm", False):
                    read = read / (read.square().mean() + torch.finfo(torch.float32).eps).sqrt() * model.scale[h, 0]
                expected = (read * read.sigmoid()) @ out[h, :, 0]
                assert abs(float(result[b, h, u]) - float(expected)) <= 1e-5, (b, h, u)


def test_the_softcap_bounds_the_gates() -> None:
    """A softcap of null leaves them unchanged, and gives different scores."""
    key, value = tokens(40)
    capped, free = scorer(name="mlstm", softcap=1.0), scorer(name="mlstm", softcap=None)
    x = torch.cat([key, value], dim=-1)
    assert capped.parts(x).log_input.abs().max() <= 1 < free.parts(x).log_input.abs().max()
    forget = (x @ free.gates)[..., 1] + free.forget_bias[:, None]
    assert torch.allclose(free.parts(x).log_forget, forget.sigmoid().log(), atol=1e-5)
    assert (capped(key, value, 5)[0] - free(key, value, 5)[0]).abs().max() > 1e-2


@pytest.mark.parametrize("softcap", [15.0, None])
def test_scores_are_finite_for_gates_of_any_size(softcap: float | None) -> None:
    """And equal the recurrent ones, even if the memory forgets everything at once or nothing over 3,000 tokens. With
    the softcap, gate inputs are between e^-15 and e^15."""
    model = scorer(name="mlstm", softcap=softcap)
    model.gates.data *= 50
    key, value = tokens(3000)
    result, _ = model(key, value, 16)
    assert result.isfinite().all()
    assert (result - recurrent(model, key, value, 16)).abs().max() <= 1e-5
    result.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize("name", SCORERS)
def test_a_score_depends_on_no_token_after_its_use(name: str) -> None:
    """At query q = u + w with the delayed readout, at token u with an immediate one."""
    window, length, changed = 5, 40, 22
    key, value = tokens(length)
    changed_key = key.clone()
    changed_key[:, :, changed] += 1.0
    for options in MLSTMS if name == "mlstm" else [{}]:
        model = scorer(name=name, **options)
        first, second = model(key, value, window)[0], model(changed_key, value, window)[0]
        used = torch.arange(length) + window
        assert (first - second)[..., used < changed].abs().max() <= 1e-6
        if name == "mlstm":
            delayed = options.get("readout") != "immediate"
            # scored before the changed token, used after it
            between = (first - second)[..., changed - window : changed].abs().max()
            assert between > 1e-4 if delayed else between <= 1e-6


def test_control_the_delayed_readout_differs_from_the_immediate_one() -> None:
    """With the same weights, the two readouts give scores that differ by more than 1e-2."""
    key, value = tokens(40)
    delayed, immediate = scorer(name="mlstm"), scorer(name="mlstm", readout="immediate")
    assert all(torch.equal(a, b) for a, b in zip(delayed.parameters(), immediate.parameters(), strict=True))
    difference = (delayed(key, value, 5)[0] - immediate(key, value, 5)[0])[..., :35]
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("name", SCORERS)
def test_untrained_scorers_keep_the_most_recent_entries(name: str) -> None:
    model, window, k, sinks = make_scorer({"name": name}, heads=H, dim=D), 4, 6, 2
    scores, log_decay = model(*tokens(50), window)
    topk = running_topk(scores, sinks, window=window, k=k, log_decay=log_decay)
    token = torch.arange(50)
    evicted_at = torch.where((token >= sinks) & (token + window + k < 50), token + window + k, 2**30)
    assert (topk.evict_at == evicted_at).all()


@pytest.mark.parametrize("name", SCORERS)
def test_gradients_reach_all_parameters_but_neither_keys_nor_values(name: str) -> None:
    model = scorer(name=name)
    key, value = (x.requires_grad_() for x in tokens(30))
    scores, log_decay = model(key, value, 4)
    assert scores.dtype == log_decay.dtype == torch.float32
    if name == "recency":
        assert not scores.requires_grad
        assert not list(model.parameters())
        return
    (scores.square().sum() + log_decay.sum()).backward()
    assert key.grad is None
    assert value.grad is None
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in model.parameters())
    low = torch.tensor(0.999).log()
    assert ((log_decay >= low) & (log_decay < 0)).all()


@pytest.mark.parametrize("length", [1, 5])
def test_rows_within_the_window_have_scores_and_gradients(length: int) -> None:
    """Data-parallel training waits for the gradient of every parameter."""
    model = scorer(name="mlstm", skip=True)
    scores, log_decay = model(*tokens(length), 5)
    assert scores.shape == (B, H, length)
    (scores.sum() + log_decay.sum()).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_under_autocast_bfloat16_inputs_are_scored_in_float32() -> None:
    model: Scorer = scorer(name="mlp")
    key, value = (x.bfloat16() for x in tokens(20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(key, value, 3)[0]
    assert scores.dtype == torch.float32
    assert torch.equal(scores, model(key.float(), value.float(), 3)[0])


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("mpl", "unknown scorer 'mpl' (did you mean 'mlp'?); known: recency, linear, mlp, mlstm"),
        (
            {"name": "mlp", "hiden": 3},
            "scorer 'mlp' has no parameter 'hiden' (did you mean 'hidden'?); it takes gamma, hidden",
        ),
        ({"name": "recency", "hidden": 3}, "it takes no parameters"),
        (None, "a scorer is a name or {name: ..., its parameters}, got null"),
        (
            {"name": "mlp", "gamma": 0.9},
            "scorer.gamma: expected a number between 0.999 and 0.999999 or null, got 0.9",
        ),
        ({"name": "mlp", "hidden": 0}, "hidden: expected a whole number >= 1 or null, got 0"),
        ({"name": "mlstm", "value": "third"}, "value: expected one of half, full, cached, got 'third'"),
        ({"name": "mlstm", "norm": 1}, "norm: expected true or false, got 1"),
        ({"name": "mlstm", "softcap": 0}, "softcap: expected a number > 0 or null, got 0"),
        ({"name": "mlstm", "chunk": True}, "chunk: expected a whole number >= 1, got true"),
    ],
)
def test_invalid_scorers_are_refused(scorer: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make_policy("kvpop", budget=40, window=8, scorer=scorer)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_building_the_policy_uses_no_random_numbers() -> None:
    """Its parameters rebuild it. k is the budget without sinks, window and `state_entries`."""
    state = torch.random.get_rng_state()
    policy: Any = make_policy("kvpop", budget=2276, scorer={"name": "mlstm", "value": "full"})
    assert policy.config.k == 2016
    assert policy.schedule.peak == 2276
    assert policy.schedule.before_attending
    assert torch.equal(state, torch.random.get_rng_state())
    rebuilt: Any = make_policy("kvpop", **policy.parameters())
    assert rebuilt.parameters() == policy.parameters()
    assert rebuilt.config == policy.config
    assert policy.parameters()["scorer"] | {"name": "mlstm", "value": "full"} == policy.parameters()["scorer"]
    smaller: Any = make_policy("kvpop", budget=2276, state_entries=65)
    assert smaller.config.k == 1951
    with pytest.raises(ValueError, match="leaves no entry"):
        make_policy("kvpop", budget=300, window=256, state_entries=40)
