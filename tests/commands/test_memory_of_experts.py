"""`sparse-rl doctor` counts the experts of a mixture-of-experts model: their parameters, their activations in training,
and the section of a trace that records them. The expected numbers are computed by hand.
"""

import pytest
import torch
from peaks import kept_for_backward
from planned import GRPO, plan

from sparse_rl.experts import routed_experts
from sparse_rl.models.weights import meta_model
from sparse_rl.recipe import make_recipe
from trainer.memory import activation_bytes, count_parameters, mlp_values

ENDS = 2 * 64 * 32 + 32  # embeddings, head, last norm
ATTENTION = 32 * (32 + 16 + 16 + 32)
NORMS = 2 * 32
EXPERTS = 8 * 3 * 32 * 24 + 8 * 32  # 8 experts of 24 and a router
WIDE = 8 * 3 * 32 * 48 + 8 * 32  # 8 experts of 48 and a router
PARAMETERS = {
    "qwen3_moe": ENDS + 2 * (ATTENTION + 2 * 8 + NORMS + EXPERTS),
    "qwen2_moe": ENDS + 2 * (ATTENTION + 64 + NORMS + EXPERTS + 3 * 32 * 32 + 32),  # biases; a shared expert, its gate
    "mixtral": ENDS + 2 * (ATTENTION + NORMS + WIDE),
    "olmoe": ENDS + 2 * (ATTENTION + 32 + 16 + NORMS + WIDE),
    "glm4_moe": ENDS + 3 * (ATTENTION + NORMS) + 3 * 32 * 48 + 2 * (EXPERTS + 3 * 32 * 24),  # the first layer is dense
}
KEPT = 6 * 32 + 8 * (3 * 4 + 4 * 2)  # values per token that attention and norms of a layer keep
ENDS_KEPT = 2 * 32  # inputs of the last norm and of the head
MLPS = {  # values per token that the MLP of each layer keeps
    "qwen3_moe": [2 * (4 * 24 + 2 * 32)] * 2,
    "qwen2_moe": [2 * (4 * 24 + 2 * 32) + 4 * 32] * 2,
    "mixtral": [2 * (4 * 48 + 2 * 32)] * 2,
    "olmoe": [2 * (4 * 48 + 2 * 32)] * 2,
    "glm4_moe": [4 * 48] + [2 * (4 * 24 + 2 * 32) + 4 * 24] * 2,
    "qwen3": [4 * 48] * 2,
}


@pytest.mark.parametrize("family", PARAMETERS)
def test_parameters_include_all_experts(new_model, family):
    model = new_model(family)
    assert plan(make_recipe(GRPO), model.config, cuda=False).parameters == PARAMETERS[family]
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[family]
    assert count_parameters(meta_model(model.config)) == PARAMETERS[family]


@pytest.mark.parametrize("family", MLPS)
def test_activations_are_those_of_the_experts_of_each_token(new_model, family):
    model, mlps = meta_model(new_model(family).config), MLPS[family]
    whole, gradients = (len(mlps) * KEPT + sum(mlps) + ENDS_KEPT, max(mlps) // 2)
    assert activation_bytes(model, 10, 2, 2, checkpointing=False) == (10 * 2 * whole, 10 * 2 * gradients)
    inputs, one_layer = len(mlps) * 32 + ENDS_KEPT, KEPT + max(mlps) + gradients
    assert activation_bytes(model, 10, 2, 2, checkpointing=True) == (10 * 2 * inputs, 10 * 2 * one_layer)
    wide = activation_bytes(model, 10, 2, 4, checkpointing=True)
    assert wide == (10 * 4 * inputs, 10 * 2 * (one_layer + 5 * 32))
    items = {item.name: item for item in plan(make_recipe(GRPO), model.config, cuda=False).items}
    assert items["activations"].device == 8 * 118 * 4 * inputs
    assert items["a layer's activations"].device == 8 * 118 * 4 * one_layer


@pytest.mark.parametrize("family", PARAMETERS)
def test_measured_activations_of_experts_are_near_the_counted_ones(new_model, family):
    """The layer also keeps its input, probabilities and indices: at most 20 % at this size."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "shared_expert_intermediate_size": 256}
    model = new_model(family, **sizes, moe_intermediate_size=256)
    layer, hidden = model.model.layers[-1], torch.randn(1, 500, 256, requires_grad=True)
    measured = kept_for_backward(model, lambda: layer.mlp(hidden)) / 4 / 500
    counted = mlp_values(layer, model.config)
    assert counted <= measured <= 1.2 * counted


@pytest.mark.parametrize("family", MLPS)
def test_traces_record_two_bytes_per_expert_of_a_token(new_model, family):
    """The section is as long as evict_at, 118 tokens in each of 8 sequences. Control: a dense model has none."""
    model = new_model(family)
    layers = 0 if family == "qwen3" else 2  # with experts
    assert sum(hasattr(layer.mlp, "experts") for layer in model.model.layers) == layers
    assert routed_experts(model) == 2 * layers
    items = {item.name: item for item in plan(make_recipe(GRPO), model.config, cuda=False).items}
    evict_at = 4 * model.config.num_hidden_layers * 2
    assert items["traces"].host == 8 * 118 * (evict_at + 2 * 2 * layers)
    assert ("4 experts each" in items["traces"].note) == (family != "qwen3")
