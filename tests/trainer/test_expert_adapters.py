"""LoRA in mixture-of-experts models adapts the attention only. PEFT would also adapt routers and experts, whose names
in older checkpoints it translates into parameters of three dimensions; this is refused in one line.
"""

from __future__ import annotations

from typing import Any

import peft
import pytest

from sparse_rl.errors import UserError
from sparse_rl.models.weights import meta_model
from trainer.arguments import adapters, check_adapters, describe_adapters
from trainer.config import LoraConfig
from trainer.memory import adapted_modules, lora_parameters

EXPERTS = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def names_of_adapters(model: Any) -> list[str]:
    prefix = "base_model.model."
    return [name.removeprefix(prefix) for name, module in model.named_modules() if hasattr(module, "lora_A")]


@pytest.mark.parametrize("family", [*EXPERTS, "qwen3", "phi3"])
def test_all_linear_selects_the_same_modules_as_peft(new_model, family):
    """With experts, these are the attention's layers. Control: PEFT alone would adapt experts of most families."""
    lora, skeleton = LoraConfig(r=4), meta_model(new_model(family).config)
    ours = [name for name, _ in adapted_modules(skeleton, lora)]
    model = peft.get_peft_model(new_model(family), adapters(lora, skeleton))
    assert names_of_adapters(model) == ours
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == lora_parameters(skeleton, lora)
    check_adapters(model)
    if family in EXPERTS:
        layers = range(skeleton.config.num_hidden_layers)
        assert ours == [f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in ATTENTION]
        trained = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {f"base_model.model.{name}" for name in ours}
    alone = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = names_of_adapters(peft.get_peft_model(new_model(family), alone))
    assert (theirs == ours) == (family not in EXPERTS)


@pytest.mark.parametrize(
    ("family", "targets", "named"),
    [
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj"], "gate_up_proj"),
        ("qwen3_moe", ["gate_proj"], "gate_up_proj"),
        ("qwen3_moe", ["down_proj"], "down_proj"),
        ("qwen3_moe", ["gate"], "gate.weight"),
        ("qwen3_moe", ".*experts.*", "down_proj, gate_up_proj"),
        ("mixtral", ["w1", "w2", "w3"], "down_proj, gate_up_proj"),
        ("olmoe", ["mlp.gate"], "gate.weight"),
        ("glm4_moe", ["down_proj"], "down_proj"),
    ],
)
def test_names_of_routers_and_experts_are_refused(new_model, family, targets, named):
    model = new_model(family)
    message = rf"target_modules: PEFT would adapt routers or experts \({named}\), which is not supported; name layers"
    with pytest.raises(UserError, match="lora." + message) as caught:
        describe_adapters(LoraConfig(target_modules=targets), meta_model(model.config))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="peft_config." + message):
        check_adapters(model, peft.LoraConfig(target_modules=targets))
    for kept in (["q_proj"], ".*self_attn.q_proj"):  # the control
        described = describe_adapters(LoraConfig(target_modules=kept), meta_model(model.config))
        assert f" in {model.config.num_hidden_layers} layers" in described
        check_adapters(model, peft.LoraConfig(target_modules=kept))


def test_target_parameters_are_refused(new_model):
    given = peft.LoraConfig(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    for model in ("nowhere", new_model("qwen3_moe")):
        with pytest.raises(UserError, match=r"would adapt routers or experts \(mlp.experts.gate_up_proj\)"):
            check_adapters(model, given)
    with pytest.raises(UserError, match="would adapt routers or experts"):
        check_adapters(peft.get_peft_model(new_model("qwen3_moe"), given))
