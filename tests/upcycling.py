"""Trained models made into mixtures of experts: each expert is the trained MLP, with noise on its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"),
)
EXPERTS, TAKEN = 8, 2
STORIES = Path(__file__).parents[2] / "shared/models/stories260K"
QUICKSTART = Path(__file__).parents[1] / "recipes/quickstart/model"


def upcycled(directory: Path, family: str, noise: float = 0.2, seed: int = 1) -> PreTrainedModel:
    """Return a model of `family` with 8 experts in each layer, of which a token takes 2.

    directory : a trained dense model whose attention has the weights of `family`
    noise : standard deviation of the factor, around 1, of each weight of an expert
    """
    dense = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    sizes = {name: getattr(dense.config, name) for name in SHARED if getattr(dense.config, name, None) is not None}
    counts = {"num_local_experts" if family == "mixtral" else "num_experts": EXPERTS, "num_experts_per_tok": TAKEN}
    inner = {} if family == "mixtral" else {"moe_intermediate_size": dense.config.intermediate_size}
    config = AutoConfig.for_model(family, **sizes, **counts, **inner, norm_topk_prob=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        return weight * (1 + noise * torch.randn(weight.shape, generator=generator))

    with torch.no_grad():
        trained = dense.state_dict()
        for name, weight in model.state_dict().items():
            if name in trained:
                weight.copy_(trained[name])
        for layer, dense_layer in zip(model.model.layers, dense.model.layers, strict=True):
            mlp = dense_layer.mlp
            for expert in range(EXPERTS):
                layer.mlp.experts.gate_up_proj[expert] = noisy(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
                layer.mlp.experts.down_proj[expert] = noisy(mlp.down_proj.weight)
            layer.mlp.gate.weight.normal_(0, 0.2, generator=generator)
    model.generation_config = dense.generation_config
    return model
