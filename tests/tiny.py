"""Tiny random models of every family, trained models, policies and prompts.

The trained models are the quickstart's model, which comes with the package, and stories260K if it is present.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparse_rl.attention.interface import adopt
from sparse_rl.data.synthetic import SYMBOLS
from sparse_rl.methods.config import accepted_parameters
from sparse_rl.methods.triattention.config import ATTACHED_AS
from sparse_rl.methods.triattention.policy import measure_centres
from sparse_rl.policies import make_policy

STORIES = Path(__file__).parents[2] / "shared/models/stories260K"
QUICKSTART = Path(__file__).parents[1] / "recipes/quickstart/model"
TRAINED = {"quickstart": (QUICKSTART, SYMBOLS.index("Q")), "stories260K": (STORIES, 1)}  # and the first token of a text
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,  # moderate logits: neither flat (no eviction matters) nor so steep that rounding shows
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# vLLM's CPU kernel needs heads of 32
HEADS_OF_32 = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 2048}
FOLDER = TemporaryDirectory(prefix="tiny-")
YARN = {"rope_type": "yarn", "factor": 256.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
MIXED = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "pad_token_id": None}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **MIXED,
}
MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2},
    **{"mamba_chunk_size": 16, "num_hidden_layers": 4, "pad_token_id": None},
}
OWN: dict[str, dict[str, Any]] = {  # settings of single families, with values other than 1 for all factors
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": None},
    "ministral3": {"rope_parameters": {"rope_theta": 1e6, **YARN}},
    "phi3": {"partial_rotary_factor": 0.75, "pad_token_id": None},
    "granite": {
        **{"logits_scaling": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 4.0},
        "attention_bias": True,
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "glm4": {"attention_bias": True, "pad_token_id": None},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen2_moe": {
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False},
        "shared_expert_intermediate_size": 32,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None},
    "glm4_moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True},
        **{"routed_scaling_factor": 1.5, "pad_token_id": None, "num_hidden_layers": 3},
    },
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": None},
    "gemma3_text": {
        **{"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        **{
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
    },
    "qwen3_next": {
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
        **{"shared_expert_intermediate_size": 32, **DELTA},
    },
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "granitemoehybrid": {
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 48, "logits_scaling": 3.0},
        **{"attention_multiplier": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 4.0, **MAMBA, **MIXED},
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "num_hidden_layers": 2},
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "full_attention", "mlp"] * 2, "num_hidden_layers": 6},
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16},
    },
    "lfm2": {**MIXED, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "olmo3": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": None},
}


def new_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """Build a tiny random model that has random biases and norms too; `overrides` replace entries of TINY."""
    config = AutoConfig.for_model(family, **{**TINY, **OWN.get(family, {}), **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.data.add_(0.1 * torch.randn_like(weight))
            if name.endswith(("mlp.gate.weight", "router.weight")):  # of a router; some families initialise it to 0
                weight.data.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model.eval()


@cache
def lend(name: str) -> Any:
    """Return the shared model of that name; skip the test if the trained model is not installed."""
    if name not in TRAINED:
        return new_model(name)
    folder, _ = TRAINED[name]
    if name == "stories260K" and not (folder / "model.safetensors").exists():
        pytest.skip("the trained model stories260K is not here")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def model_of(name: str) -> Any:
    """Return the shared model of a family or a key of TRAINED, with our attention; tests must not change it."""
    return adopt(lend(name))


@cache
def centred(name: str) -> Any:
    """Return the shared model of that name with centres of its queries, for the policy `triattention`."""
    model, (text,) = model_of(name), prompts_of(name, (200,), seed=9)
    setattr(model, ATTACHED_AS, measure_centres(model, text))
    return model


def policy_of(name: str, **parameters: Any) -> Any:
    """Return the policy of that name, built with those parameters that it accepts."""
    accepted = accepted_parameters(name)
    return make_policy(name, **{key: value for key, value in parameters.items() if key in accepted})


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]


def prompts_of(name: str, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return prompts: random tokens, or texts sampled from the trained model itself."""
    if name not in TRAINED:
        return random_prompts(lengths, seed)
    return [list(ids) for ids in written(name, tuple(lengths), seed)]


@cache
def written(name: str, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    """Return texts that a trained model samples."""
    generator = torch.Generator().manual_seed(seed)
    model, ids = model_of(name), torch.full((len(lengths), 1), TRAINED[name][1])
    with torch.no_grad():
        while ids.shape[1] < max(lengths):
            chances = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


@cache
def loaded(folder: Path) -> Any:
    """Return the shared model in that directory, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def directory_of(family: str, seed: int = 0, **config: Any) -> Path:
    """Return the directory of a tiny model that vLLM can run. Tests must not change its files."""
    folder = Path(mkdtemp(prefix=family, dir=FOLDER.name))
    new_model(family, seed=seed, **{**HEADS_OF_32, **config}).save_pretrained(folder)
    return folder
