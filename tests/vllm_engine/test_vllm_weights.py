"""Weight updates of the vLLM engine by a trainer replace every weight, or are refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from judging import same, trainer_gap
from test_vllm_against_hf import ON_BOTH
from tiny import HEADS_OF_32, directory_of, loaded, new_model, policy_of, random_prompts
from transformers.integrations import deepspeed

from rollout import SamplingConfig
from sparse_rl.attention.families import READ_BY_ONE

OFTEN = ("qwen2", "qwen3", "llama")  # updates of the other families are slow tests
LAYERS = [
    "embed_tokens",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "norm",
    "lm_head",
]
FUSED = [("phi3", "qkv_proj"), ("phi3", "gate_up_proj"), ("glm4", "gate_up_proj"), ("olmo2", "q_norm")]
SAMPLING = SamplingConfig(30, seed=0, ignore_eos=True)
LENGTHS = (5, 70, 90, 130)
POLICY = policy_of("gkv", budget=64, window=8, period=16)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, marks=[] if family in OFTEN else pytest.mark.slow)
        for family in ON_BOTH
        for tied in (False, True)
        if not (tied and "tie_word_embeddings" in READ_BY_ONE.get(family, {}))
    ],
)
@pytest.mark.few(2)
def test_updates_reach_every_weight(family: str, tied: bool, open_engine: Callable) -> None:
    """Five updates. Control: under the new weights, earlier rollouts have a gap of at least 1e-2."""
    folder = directory_of(family, tie_word_embeddings=tied)
    model = type(new_model(family)).from_pretrained(folder, dtype=torch.float32).eval()
    exact = tied or family not in OFTEN  # vLLM's own kernels round more coarsely
    engine, prompts = open_engine(POLICY, folder, exact=exact), random_prompts(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    before = engine.generate(prompts, SAMPLING)
    for update in range(5):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
            stale_gap = trainer_gap(model, before)
        # a tied head has both names in the state dict, and one name among the parameters
        engine.load_weights((model.state_dict() if update % 2 else dict(model.named_parameters())).items())
        rollouts = engine.generate(prompts, SAMPLING)
        largest_gap = trainer_gap(model, rollouts)
        assert largest_gap <= 1e-5
        assert stale_gap >= 1e-2
        before = rollouts


@pytest.mark.parametrize(
    ("family", "layer"),
    [("qwen2", layer) for layer in LAYERS] + [pytest.param(*case, marks=pytest.mark.slow) for case in FUSED],
)
@pytest.mark.few(1)
def test_control_a_single_stale_weight_gives_a_gap(family: str, layer: str, open_engine: Callable) -> None:
    model = type(new_model(family)).from_pretrained(directory_of(family), dtype=torch.float32).eval()
    engine, prompts = open_engine(POLICY, family, shared=True), random_prompts(LENGTHS)
    engine.load_weights(model.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if layer in name:
                weight.mul_(1.3)
        stale_rollouts = engine.generate(prompts, SAMPLING)
        assert trainer_gap(model, stale_rollouts) >= 1e-3
        engine.load_weights(model.named_parameters())
        rollouts = engine.generate(prompts, SAMPLING)
        assert trainer_gap(model, rollouts) <= 1e-5


def test_updates_may_come_in_any_order_and_one_weight_at_a_time(open_engine: Callable) -> None:
    """From a generator that is read once; tensors may be bfloat16, and may be changed afterwards."""
    engine, prompts = open_engine(POLICY, "qwen3", shared=True), random_prompts(LENGTHS)
    other = new_model("qwen3", seed=1, **HEADS_OF_32)
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(weight.bfloat16())

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in sorted(other.named_parameters(), reverse=True):
            passing = weight.detach().bfloat16()
            yield name, passing

    engine.load_weights(weights())
    rollouts = engine.generate(prompts, SAMPLING)
    assert trainer_gap(other, rollouts) <= 1e-5
    for weight in other.parameters():
        weight.data.zero_()
    assert same(engine.generate(prompts, SAMPLING), rollouts)


def test_missing_unknown_and_misshapen_weights_are_refused(open_engine: Callable) -> None:
    """The engine can be used afterwards."""
    engine, prompts = open_engine(POLICY, shared=True), random_prompts(LENGTHS)
    good = dict(loaded(directory_of("qwen2")).named_parameters())
    engine.load_weights(good.items())
    expected = engine.generate(prompts, SAMPLING)
    attention, mlp = "model.layers.1.self_attn", "model.layers.0.mlp"
    for missing in (
        *("model.embed_tokens.weight", f"{attention}.k_proj.weight", f"{attention}.v_proj.bias", "model.norm.weight"),
        *(f"{mlp}.up_proj.weight", f"{mlp}.down_proj.weight", "lm_head.weight"),
    ):
        with pytest.raises(ValueError, match="cannot take the weights"):
            engine.load_weights((n, w[:-1] if n == missing else w) for n, w in good.items())
        with pytest.raises(ValueError, match="nothing"):
            engine.load_weights([*good.items(), (f"{missing}.nothing", torch.zeros(1))])
        with pytest.raises(ValueError, match="were not handed over"):
            engine.load_weights((n, w) for n, w in good.items() if n != missing)
        engine.load_weights(good.items())
        assert same(engine.generate(prompts, SAMPLING), expected), missing


def test_updates_work_under_zero_3(open_engine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """There transformers partitions every new model among the processes of the run."""
    engine, prompts = open_engine(POLICY, "qwen3", shared=True), random_prompts(LENGTHS)
    other = new_model("qwen3", seed=1, **HEADS_OF_32)
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", None)
    in_force = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    assert in_force.is_zero3()
    assert deepspeed.is_deepspeed_zero3_enabled()
    for _ in range(2):
        engine.load_weights(other.named_parameters())
    rollouts = engine.generate(prompts, SAMPLING)
    assert trainer_gap(other, rollouts) <= 1e-5


# ---- updates of another process -------------------------------------------------------------------------------------


def test_weights_are_handed_over_bit_for_bit() -> None:
    """For any dtype, shape and memory order. No file and no descriptor remains, also after an error."""
    from rollout.vllm.engine import handed_over
    from rollout.vllm.worker import received

    weights = {
        "odd": torch.randn(7),
        "half": torch.randn(5, 3).bfloat16(),
        "turned": torch.randn(6, 4).T,
        "one": torch.tensor(2.5, dtype=torch.float64),
        "learns": torch.nn.Parameter(torch.tensor([-0.0, float("nan"), float("inf")])),
        **dict(new_model("qwen2").named_parameters()),
    }
    names = []

    def one_at_a_time() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights.items():
            copy = weight.detach().clone()
            yield name, copy
            copy.zero_()
            names.append(name)

    before = os.listdir("/proc/self/fd")
    with handed_over(one_at_a_time()) as (path, places):
        assert names == list(weights)
        for (name, weight), received_weight in zip(weights.items(), received(path, places), strict=True):
            assert received_weight[0] == name
            assert received_weight[1].dtype == weight.dtype
            assert received_weight[1].shape == weight.shape
            assert same_bits(received_weight[1], weight.detach())
    assert not os.path.exists(path)
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ZeroDivisionError), handed_over((str(1 // 0), w) for w in weights.values()):
        raise AssertionError
    assert os.listdir("/proc/self/fd") == before


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.contiguous().view(-1).view(torch.uint8) == b.contiguous().view(-1).view(torch.uint8)).all())


def test_an_engine_in_a_separate_process_gets_all_weights(open_engine: Callable) -> None:
    """An update handed over as to a separate process equals a direct one; both happen in this process."""
    engine, prompts = open_engine(POLICY, "qwen3", shared=True), random_prompts(LENGTHS)
    other = new_model("qwen3", seed=2, **HEADS_OF_32)
    before = engine.generate(prompts, SAMPLING)
    results = []
    for separate in (False, True):
        engine.separate = separate
        engine.load_weights(other.named_parameters())
        engine.separate = False  # the normal state for closing the engine
        results.append(engine.generate(prompts, SAMPLING))
        engine.load_weights((name, weight * 0) for name, weight in other.named_parameters())
    assert same(*results)
    assert not same(results[0], before)
