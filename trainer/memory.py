"""Estimates the memory of a training: weights, gradients, optimizer state, activations, and the loss."""

from __future__ import annotations

import re
from typing import Any

from torch.nn import Linear

from sparse_rl.experts import routed_experts
from trainer.config import ALL_LINEAR, LaunchConfig, LoraConfig


def count_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def adapted_modules(model: Any, lora: LoraConfig) -> list[tuple[str, Any]]:
    """Return (name, module) of every module that `lora.target_modules` selects (see LoraConfig).

    PEFT's rules apply, except that `all-linear` selects only linear layers of the attention in a model with experts:
    PEFT would select routers and experts too, and can select no other layer without these.
    """
    attention_only = routed_experts(model) > 0

    def adapted(name: str, module: Any) -> bool:
        if isinstance(lora.target_modules, list):
            return any(name == target or name.endswith(f".{target}") for target in lora.target_modules)
        if lora.target_modules == ALL_LINEAR:
            linear = isinstance(module, Linear) and module is not model.get_output_embeddings()
            return linear and (not attention_only or ".self_attn." in name)
        return re.fullmatch(lora.target_modules, name) is not None

    return [(name, module) for name, module in model.named_modules() if adapted(name, module)]


def lora_parameters(model: Any, lora: LoraConfig) -> int:
    linear = [module for _, module in adapted_modules(model, lora) if isinstance(module, Linear)]
    return sum(lora.r * (module.in_features + module.out_features) for module in linear)


def training_state(
    parameters: int, trainable: int, *, itemsize: int, adapters: bool, launch: LaunchConfig
) -> dict[str, tuple[int, int]]:
    """Return the memory of one process as {part: (bytes on the device, bytes in host memory)}: weights, gradients and
    optimizer (AdamW's state).

    Without DeepSpeed, each weight has `itemsize` bytes, and AdamW keeps two float32 moments per trained parameter.
    Adapters are additional weights in float32. With several processes, DDP's buckets hold the gradients a second time.

    DeepSpeed keeps float32 master weights and two moments. It partitions these over the processes from stage 1 on,
    gradients (in launch.gradient_dtype) from stage 2 on, and weights in stage 3 (table in the ZeRO paper).
    """
    if not launch.zero_stage:
        weights = parameters * itemsize + (4 * trainable if adapters else 0)
        gradients = (4 if adapters else itemsize) * trainable * (1 if launch.processes == 1 else 2)
        return {"weights": (weights, 0), "gradients": (gradients, 0), "optimizer": (8 * trainable, 0)}

    def share(size: int, stage: int) -> int:
        return -(-size // launch.processes) if launch.zero_stage >= stage else size

    weights = share((parameters + (trainable if adapters else 0)) * itemsize, 3)
    gradients = share((4 if launch.gradient_dtype == "float32" else itemsize) * trainable, 2)
    optimizer = share(12 * trainable, 1)
    moved = launch.offload and launch.zero_stage == 3
    parts = {"weights": (weights, moved), "gradients": (gradients, moved), "optimizer": (optimizer, launch.offload)}
    return {name: (0, size) if in_host else (size, 0) for name, (size, in_host) in parts.items()}


def activation_bytes(model: Any, tokens: int, itemsize: int, stream: int, checkpointing: bool) -> tuple[int, int]:
    """Estimate the bytes that activations hold from forward to backward pass, and in the backward pass of one layer.

    A layer keeps about 6 hidden vectors per token (two norms, residuals), 2 more for each further norm (Gemma 3 has
    four), two copies of queries, keys and values (RoPE), the attention output, and the vectors of the MLP
    (`mlp_values`); its backward pass adds gradients of half of the latter. With gradient checkpointing only the inputs
    of layers, last norm and head are kept, and a layer's vectors are computed again.

    stream : bytes of a number in the residual stream and 5 of the 6 vectors: those of the weights, 4 under autocast
    """
    config, hidden = model.config, int(model.config.hidden_size)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    attended = dim * (3 * heads + 4 * config.num_key_value_heads)
    kept, again = 2 * hidden * stream, 0
    for layer in model.get_decoder().layers:
        more = 2 * max(0, sum("norm" in name for name, _ in layer.named_children()) - 2)
        mlp = mlp_values(layer, config)
        own = 5 * hidden * stream + ((1 + more) * hidden + attended + mlp) * itemsize
        kept += hidden * stream if checkpointing else own
        again = max(again, own * checkpointing + mlp * itemsize // 2)
    return tokens * kept, tokens * again


def loss_bytes(config: Any, tokens: int, logits: int, trained: bool) -> int:
    """Estimate the bytes of the loss: hidden states, their gradient, and the larger of logits and a head's gradient."""
    return config.hidden_size * 8 * tokens + max(logits, 6 * trained * config.vocab_size * config.hidden_size)


def mlp_values(layer: Any, config: Any) -> int:
    """Return the values per token that the MLP of a layer keeps: 4 intermediate vectors.

    With experts, each of a token's experts keeps these, its input and its output; an expert that all tokens share
    keeps 4 intermediate vectors.
    """
    if (experts := getattr(layer.mlp, "experts", None)) is None:
        return 4 * config.intermediate_size
    ends = [module for name, module in layer.named_modules() if name.endswith("down_proj")]
    shared = sum(module.in_features for module in ends)
    return config.num_experts_per_tok * (4 * experts.down_proj.shape[-1] + 2 * config.hidden_size) + 4 * shared
