"""Bytes that a training holds of weights, gradients, the optimizer's state and activations. No model is loaded."""

from __future__ import annotations

import re
from typing import Any

from torch.nn import Linear

from trainer.config import LaunchConfig, LoraConfig


def count_parameters(model: Any) -> int:
    """Parameters of a model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def adapted_modules(model: Any, lora: LoraConfig) -> list[tuple[str, Any]]:
    """(name, module) of what target_modules names, whatever it is.

    As PEFT has it: `all-linear` leaves out the head, other text is a pattern for whole names, a list holds last names.
    """

    def adapted(name: str, module: Any) -> bool:
        if isinstance(lora.target_modules, list):
            return any(name == target or name.endswith(f".{target}") for target in lora.target_modules)
        if lora.target_modules == "all-linear":
            return isinstance(module, Linear) and module is not model.get_output_embeddings()
        return re.fullmatch(lora.target_modules, name) is not None

    return [(name, module) for name, module in model.named_modules() if adapted(name, module)]


def lora_parameters(model: Any, lora: LoraConfig) -> int:
    """Parameters of rank-r adapters: r (in + out) for every adapted linear layer."""
    linear = [module for _, module in adapted_modules(model, lora) if isinstance(module, Linear)]
    return sum(lora.r * (module.in_features + module.out_features) for module in linear)


def training_state(
    parameters: int, trainable: int, *, itemsize: int, adapters: bool, launch: LaunchConfig
) -> dict[str, tuple[int, int]]:
    """Weights, gradients and AdamW's state of one process: name -> (bytes on the device, bytes in host memory).

    Without DeepSpeed: AdamW keeps two float32 moments, on weights of `itemsize`; adapters are float32 beside frozen
    weights; several processes hold their gradients again as buckets. With it: a float32 master copy and two moments,
    partitioned over the processes from stage 1, gradients from stage 2, weights from stage 3 (the ZeRO paper's table).
    """
    if not launch.zero_stage:
        weights = parameters * itemsize + (4 * trainable if adapters else 0)
        gradients = (4 if adapters else itemsize) * trainable * (1 if launch.processes == 1 else 2)
        return {"weights": (weights, 0), "gradients": (gradients, 0), "optimizer": (8 * trainable, 0)}

    def share(size: int, stage: int) -> int:
        return -(-size // launch.processes) if launch.zero_stage >= stage else size

    weights = share((parameters + (trainable if adapters else 0)) * itemsize, 3)
    optimizer = share(12 * trainable, 1)
    moved = launch.offload and launch.zero_stage == 3
    return {
        "weights": (0, weights) if moved else (weights, 0),
        "gradients": (share(itemsize * trainable, 2), 0),
        "optimizer": (0, optimizer) if launch.offload else (optimizer, 0),
    }


def activation_bytes(config: Any, tokens: int, itemsize: int, checkpointing: bool, logits: bool) -> int:
    """A rough estimate of what forward and backward keep of `tokens` tokens.

    Per layer its input; and per token about 6 hidden vectors (norms, residuals), queries, keys and values twice
    (RoPE), the attention's output, 4 intermediate vectors: of one layer at a time with checkpointing, else of all.
    `logits`: the whole [tokens, vocabulary] at itemsize and twice in float32 (GRPO's fused head holds tiles only).
    """
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = 6 * config.hidden_size + dim * (3 * heads + 4 * config.num_key_value_heads) + 4 * config.intermediate_size
    layers = config.num_hidden_layers
    kept = layers * config.hidden_size + layer if checkpointing else layers * layer
    return tokens * (kept * itemsize + (config.vocab_size * (itemsize + 8) if logits else 0))
