"""The table of published models in docs/families.md: what each configuration, as published, is used for.

The sizes that decide nothing are small here. `python tests/models/test_published_models.py` prints the table.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from sparse_rl.attention.families import NOISES, check_replayable, family_only_hf, longest_text, windows_of
from sparse_rl.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SMALL = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": None},
}
WHOLE = {"use_sliding_window": False, "sliding_window": 131_072, "max_window_layers": 28}
LONG = {
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    **{"original_max_position_embeddings": 4096, "max_position_embeddings": 131_072, "sliding_window": 262_144},
}
DROPS = {"attention_dropout": 0.1, "residual_dropout": 0.1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}

STATES = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 32}


def quantized(method: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method}}


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5 (all sizes), DeepSeek-R1-Distill-Qwen": ("qwen2", WHOLE | {"max_position_embeddings": 32_768}),
    "Qwen2.5-7B-Instruct-1M": ("qwen2", WHOLE | {"dual_chunk_attention_config": {"chunk_size": 262_144}}),
    "gte-Qwen2-1.5B-instruct": ("qwen2", WHOLE | {"is_causal": False}),
    "Qwen2.5-7B-Instruct-AWQ": ("qwen2", WHOLE | quantized("awq")),
    "Qwen3 (dense)": ("qwen3", WHOLE | {"sliding_window": None}),
    "Qwen3-8B-FP8": ("qwen3", quantized("fp8")),
    "DeepSeek-R1-0528-Qwen3-8B": ("qwen3", {"rope_scaling": YARN, "max_position_embeddings": 131_072}),
    "Qwen3-30B-A3B": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "Llama 3.1, 3.2, DeepSeek-R1-Distill-Llama": (
        "llama",
        {
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131_072,
        },
    ),
    "Mistral-7B-v0.1": ("mistral", {"sliding_window": 4096, "max_position_embeddings": 32_768}),
    "Mistral-7B-v0.3, Mistral-Nemo": ("mistral", {"sliding_window": None, "max_position_embeddings": 32_768}),
    "Ministral-8B-Instruct-2410": ("mistral", {"sliding_window": 32_768, "max_position_embeddings": 32_768}),
    "Mixtral-8x7B-v0.1": ("mixtral", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Phi-3-mini-4k-instruct": ("phi3", {"sliding_window": 2047, "max_position_embeddings": 4096}),
    "Phi-3-mini-128k-instruct": ("phi3", LONG),
    "Phi-4-mini-instruct": ("phi3", LONG | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "phi-4": ("phi3", {"sliding_window": None, "max_position_embeddings": 16_384}),
    "granite-3.0-2b-instruct": ("granite", {"attention_dropout": 0.1, "max_position_embeddings": 4096}),
    "granite-3.3-2b-instruct": ("granite", {"attention_dropout": 0.0, "max_position_embeddings": 131_072}),
    "granite-4.0-micro": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * 2, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "Seed-OSS-36B-Instruct": ("seed_oss", DROPS | {"attention_bias": True, "attention_out_bias": False}),
    "starcoder2-3b, 7b, 15b": (
        "starcoder2",
        DROPS | {"embedding_dropout": 0.1, "sliding_window": 4096, "max_position_embeddings": 16_384, "use_bias": True},
    ),
    "SmolLM3-3B": ("smollm3", {"use_sliding_window": False, "no_rope_layers": [1, 0]}),
    "OLMo-2-1124-7B": ("olmo2", {"max_position_embeddings": 4096}),
    "Olmo-3-7B": ("olmo3", {"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma-3-1b-it": ("gemma3_text", {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma-2-2b": ("gemma2", {}),
    "GLM-4-9B-0414": ("glm4", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "OLMoE-1B-7B": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "use_sliding_window": False}),
    "Qwen3-Next-80B-A3B-Instruct": ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 2, **STATES}),
    "granite-4.0-h-tiny": ("granitemoehybrid", {"num_local_experts": 4, "num_experts_per_tok": 2, **MAMBA, **STATES}),
    "Bamba-9B": ("bamba", {"attn_layer_indices": [1], **MAMBA}),
    "Falcon-H1-1.5B": ("falcon_h1", {"mamba_d_ssm": 128, "mamba_norm_before_gate": False, **MAMBA}),
    "LFM2-1.2B": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "gpt-oss-20b": ("gpt_oss", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
}


def verdict(family: str, settings: dict[str, Any]) -> str:
    """Return the row's text: the engines that sample from the configuration, or the reason of its refusal."""
    config = AutoConfig.for_model(family, **{**SMALL, **settings})
    try:
        check_replayable(config)
    except UserError as error:
        return f"refused: {error.message.partition('cannot be replayed: ')[2]}"
    only = family_only_hf(config)
    text = f"hf ({only.partition(': ')[2]})" if only else "hf and vllm"
    if any(windows_of(config)):
        text = "hf (sliding windows in some layers)"
    if (limit := longest_text(config)) is not None:
        text += f", up to {limit[0]:,} tokens"
    if noises := [name for name in NOISES if getattr(config, name, 0)]:
        text += f"; {', '.join(noises)} set to 0"
    return text


def rows() -> list[str]:
    """Return a row for each verdict, with its models and their families."""
    models = defaultdict[str, list[str]](list)
    for name, (family, own) in PUBLISHED.items():
        models[verdict(family, own)].append(f"{name} (`{family}`)")
    return [f"| {text} | {'; '.join(names)} |" for text, names in models.items()]


def test_the_table_of_published_models_is_current() -> None:
    table = PAGE.read_text("utf-8").partition("## Published models")[2].partition("\n## ")[0]
    assert [line for line in table.splitlines() if line.startswith("| ") and "`" in line] == rows()


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "hf" in verdict(*PUBLISHED[name])[:3]])
@pytest.mark.few(8)
def test_an_accepted_configuration_equals_transformers(name: str) -> None:
    """A tiny model of the configuration, with large queries: engine and replay equal eager attention."""
    import torch
    from eager import check_as_exact, eager_copy, sampled_logprobs, sharpened
    from transformers import AutoModelForCausalLM

    from rollout import SamplingConfig, make_engine
    from sparse_rl.attention.interface import adopt
    from sparse_rl.attention.logprobs import replay_logprobs

    family, settings = PUBLISHED[name]
    without_noise = {key: value for key, value in settings.items() if key not in NOISES}
    config = AutoConfig.for_model(family, **{**SMALL, **without_noise, **dict.fromkeys(NOISES, 0.0)})
    torch.manual_seed(0)
    model = sharpened(AutoModelForCausalLM.from_config(config).eval())
    eager = eager_copy(model)
    rollouts = make_engine("hf", model=adopt(model), policy="full").generate(
        [[5, 9, 11], list(range(3, 40))], SamplingConfig(30, seed=1, ignore_eos=True)
    )
    with torch.no_grad():
        check_as_exact(eager, rollouts, sampled_logprobs(rollouts), replay_logprobs(model, rollouts))


if __name__ == "__main__":
    print("\n".join(rows()))
