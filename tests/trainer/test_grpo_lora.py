"""LoRA: only the adapter learns, the invariant holds, and the final model is base plus adapter."""

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from trainer_runs import steps, trained
from transformers import AutoModelForCausalLM

from rollout import SamplingConfig, make_engine
from sparse_rl.commands.train import train
from sparse_rl.recipe import make_recipe


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("qwen3", False),
        ("qwen3", True),
        *(
            pytest.param(name, False, marks=pytest.mark.slow)
            for name in ("gemma3_text", "qwen3_5_text", "bamba", "lfm2")
        ),
    ],
)
@pytest.mark.few(1)
def test_only_the_adapter_learns(family, own, grpo, tiny):
    """Also if the engine has its own weights, which are merged with the adapter at every step."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    engine = {"model": tiny(), "own_weights": tiny()} if own else {"gradient_checkpointing": True}
    trainer = grpo(family=family, peft_config=lora, learning_rate=1e-2, max_steps=3, **engine)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    lines = trained(trainer)
    assert max(line["replay/gap_max"] for line in lines) <= 1e-5
    assert max(line.get("sync/probe_gap", 0) for line in lines) <= 1e-5
    assert all(line["grad_norm"] > 0 for line in lines)
    changed = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    adapter = {name for name in before if "lora_" in name}
    assert changed == adapter != set()


def test_the_recipe_exports_a_merged_model(tiny, tmp_path):
    recipe = make_recipe(
        {
            "kind": "grpo",
            "model": tiny("llama"),
            "output_dir": str(tmp_path),
            "dtype": "float32",
            "data": {"synthetic": {"task": "running_sum", "size": 64}},
            "cache": {"policy": "tova", "budget": 8},
            "rewards": ["trainer_runs:digits"],
            "rollout": {"engine": "hf"},
            "lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]},
            "learning_rate": 1e-2,
            "max_steps": 2,
            "max_completion_length": 16,
            "save_steps": 0,
            "importance_correction": "none",
        }
    )
    folder = train(recipe)
    assert max(line["replay/gap_max"] for line in steps(tmp_path)) <= 1e-5
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    base = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32).state_dict()
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    pairs = {name.split("base_model.model.")[1].split(".lora_")[0] for name in adapter}
    assert pairs == {f"model.layers.{i}.{m}" for i in (0, 1) for m in ("self_attn.q_proj", "mlp.down_proj")}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module not in pairs:
            assert torch.equal(merged[name], weight)
            continue
        down, up = (adapter[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(merged[name], weight + 2 * up @ down, rtol=1e-6, atol=1e-7)
        assert not torch.equal(merged[name], weight)
    assert json.loads((folder / "cache_policy.json").read_text())["policy"] == "tova"
    rollout = make_engine("hf", model=folder, policy="full").generate([[5, 6, 7]], SamplingConfig(4, seed=0))[0]
    assert rollout.completion_ids
