"""The settings of a family's config.json are a closed list: each that transformers or vLLM reads is in a table, and
each, changed alone, is exact or refused. A setting that only one of them reads is wrong without a word."""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from eager import check_as_exact, eager_copy, largest_difference, plain_logprobs, sampled_logprobs, sharpened
from tiny import new_model
from transformers import AutoConfig

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.families import (
    ANY,
    EVERY_FAMILY,
    FAMILIES,
    NO_WINDOWS,
    NOISES,
    READ_BY_ONE,
    REQUIRED,
    WHOLE_WINDOWED,
    check_replayable,
    context_length,
    family_only_hf,
    longest_text,
)
from sparse_rl.attention.interface import adopt
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.errors import UserError

# Settings that both libraries read alike; test_a_changed_setting_is_exact_or_refused tests those of the first line.
ALIKE = {
    *("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier", "query_pre_attn_scalar"),
    *("rms_norm_eps", "norm_epsilon", "use_bias", "use_qk_norm", "use_sliding_window", "no_rope_layers", "clip_qkv"),
    *("norm_topk_prob", "routed_scaling_factor", "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace"),
    # sizes, and RoPE, whose kinds tests/vllm_engine/test_vllm_families.py tests
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rope_parameters", "moe_intermediate_size", "num_experts"),
    *("num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("original_max_position_embeddings", "tie_word_embeddings", "hidden_activation"),
    # of hybrid families, from which only hf samples
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_value_head_dim", "linear_allow_neg_eigval", "linear_a_log_max", "linear_a_log_min", "linear_dt_max"),
    *("linear_dt_min", "linear_dt_init_floor", "layers_block_type", "mamba_chunk_size", "mamba_conv_bias"),
    *("mamba_d_conv", "mamba_d_head", "mamba_d_ssm", "mamba_d_state", "mamba_expand", "mamba_n_groups"),
    *("mamba_n_heads", "mamba_proj_bias", "mamba_head_dim", "mamba_hidden_act", "mamba_num_heads", "n_groups"),
    *("mamba_norm_before_gate", "position_embedding_type", "shared_intermediate_size", "time_step_limit"),
    *("time_step_floor", "time_step_max", "time_step_min", "chunk_size", "conv_kernel", "layer_norm_epsilon"),
    *("mlp_hidden_act", "moe_latent_size", "moe_shared_expert_intermediate_size", "ssm_state_size"),
    *("use_conv_bias", "attention_in_multiplier", "attention_out_multiplier", "key_multiplier"),
    *("lm_head_multiplier", "mlp_multipliers", "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier"),
    *("projectors_bias", "norm_eps", "conv_L_cache", "conv_bias", "block_auto_adjust_ff_dim"),
    *("block_ffn_dim_multiplier", "block_multiple_of"),
}
NOT_COMPUTED = {  # names of settings and methods that change nothing that a model computes for a text
    *("_attn_implementation", "pad_token_id", "initializer_range", "output_router_logits", "router_aux_loss_coef"),
    *("get_text_config", "text_config", "vision_config", "image_token_id", "mm_tokens_per_image"),  # of multimodal ones
    *("depth", "in_channels", "num_heads", "num_position_embeddings", "out_hidden_size", "patch_size"),  # of images
    *("spatial_merge_size", "temporal_patch_size", "video_token_id", "num_logits_to_keep", "z_loss_coefficient"),
    *("rescale_prenorm_residual", "use_mamba_kernels"),
    *("max_window_layers", "target_layer_count", "num_nextn_predict_layers", "ada_rms_norm_t_cond_dim"),
}
VLLM_FILES = {  # family -> files of vLLM's code; the other families run in its Transformers backend
    **{name: [name] for name in ("qwen2", "llama", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe")},
    **{"qwen3": ["qwen3", "qwen2"], "ministral3": ["mistral", "llama"]},
    **{name: [name, "llama"] for name in ("mistral", "phi3", "granite", "glm4")},
}
CONFIGS = ("config", "hf_config", "hf_text_config", "text_config")


def package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


def settings_read(file: Path) -> set[str]:
    """Return the attributes of a configuration that a source file reads."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            owner, name = node.args[0], getattr(node.args[1], "value", "")
        else:
            continue
        if getattr(owner, "id", getattr(owner, "attr", "")) in CONFIGS:
            names.add(name)
    return names


def of_transformers(family: str) -> set[str]:
    folder = family.removesuffix("_text")
    return settings_read(package("transformers") / "models" / folder / f"modeling_{folder}.py")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_that_is_read_is_in_a_table(family: str) -> None:
    """Settings of one reader alone have a value under which both compute the same. Controls: the two lists differ."""
    one_reader = {**EVERY_FAMILY, **READ_BY_ONE.get(family, {})}
    listed = {*ALIKE, *NOT_COMPUTED, *REQUIRED, *NOISES, *one_reader}
    theirs = of_transformers(family)
    assert {"hidden_size", "num_hidden_layers"} <= theirs  # control: the source is found
    assert theirs - listed == set()
    if family not in VLLM_FILES:
        return
    models = package("vllm") / "model_executor" / "models"
    vllms = set().union(*(settings_read(models / f"{name}.py") for name in VLLM_FILES[family]))
    assert vllms - listed == set()
    assert theirs ^ vllms, "control: the libraries read different settings"
    elsewhere = {"num_local_experts", "layer_types", "head_dim", "original_max_position_embeddings", "sliding_window"}
    for name in theirs - vllms - NOT_COMPUTED - elsewhere - {*NOISES, *REQUIRED}:
        assert one_reader.get(name, ANY) is not ANY, f"vLLM does not read {name}"


# ---- each setting, changed alone ------------------------------------------------------------------------------------

SIZES = {name for name in ALIKE if name.startswith(("num_", "n_")) or name.endswith(("_size", "_dim"))}
FIXED = {"max_position_embeddings", "rope_parameters", "original_max_position_embeddings", "tie_word_embeddings"}


def others(name: str, value: Any) -> list[Any]:
    """Return further values of a setting whose value in a tiny model is `value`."""
    if name == "is_causal":
        return [False]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [1.5 * value or 0.3]
    if isinstance(value, str):
        return ["gelu"] if value == "silu" else []
    return [True, 4, 0.5] if value is None else []


def changes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (family, changed settings) for every setting that a family's code, or a mask or a cache, reads."""
    masks = {"is_causal", "attention_chunk_size", "sliding_window", "layer_types", "use_sliding_window"}
    for family in FAMILIES:
        config = AutoConfig.for_model(family)
        names = (of_transformers(family) | masks | {*NOISES}) - SIZES - FIXED - NOT_COMPUTED
        for name in sorted(names):
            for value in others(name, getattr(config, name, None)):
                yield family, {name: value}
        for more in (*({"use_sliding_window": on} for on in (True, False)), {"layer_types": ["full_attention"] * 2}):
            yield family, {"sliding_window": 4, **more}


CHANGES = list(changes())
PROMPTS = [torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 11, 40)]


replayed = torch.no_grad()(replay_logprobs)


def check_exact_or_refused(family: str, settings: dict[str, Any]) -> bool:
    """Return True if a model with the settings equals transformers' eager attention, False if it is refused."""
    try:
        model = sharpened(new_model(family, **settings))
    except Exception as error:  # any exception of transformers for a value that its own configuration refuses
        assert not isinstance(error, AssertionError)
        return False
    eager = eager_copy(model)
    try:
        engine = make_engine("hf", model=adopt(model), policy="full")
        rollouts = engine.generate(PROMPTS, SamplingConfig(30, seed=1, ignore_eos=True))
    except UserError as error:
        assert "\n" not in str(error)
        return False
    check_as_exact(eager, rollouts, sampled_logprobs(rollouts), replayed(model, rollouts))
    return True


@pytest.mark.parametrize(("family", "settings"), CHANGES, ids=str)
@pytest.mark.few(40)
def test_a_changed_setting_is_exact_or_refused(family: str, settings: dict[str, Any]) -> None:
    check_exact_or_refused(family, settings)


@pytest.mark.slow
def test_pairs_of_changed_settings_are_exact_or_refused() -> None:
    alone = [change for change in CHANGES if not {*change[1]} & {*REQUIRED, *NOISES}]  # not refused anyway
    pairs = [(a, b) for a, b in itertools.combinations(alone, 2) if a[0] == b[0] and not {*a[1]} & {*b[1]}]
    exact = 0
    for (family, first), (_, second) in random.Random(0).sample(pairs, 200):
        exact += check_exact_or_refused(family, {**first, **second})
    assert exact > 20  # control: not everything is refused


# ---- windows of all layers, and RoPE that depends on the length -----------------------------------------------------


@pytest.mark.parametrize("family", WHOLE_WINDOWED)
@pytest.mark.parametrize("more", [{}, {"use_sliding_window": False}, {"layer_types": ["full_attention"] * 2}], ids=str)
@pytest.mark.few(7)
def test_a_window_of_all_layers_limits_the_length(
    family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer text is refused by engine and replay. Control: without the check, the engine is at least 0.1 off.
    `layer_types` and `use_sliding_window` change nothing else."""
    model = sharpened(new_model(family, **{"sliding_window": 20, "use_sliding_window": True, **more}))
    eager, sampling = eager_copy(model), SamplingConfig(8, seed=1, ignore_eos=True)
    reads_switch = family == "qwen3_moe" and more.get("use_sliding_window") is False
    assert longest_text(model.config) is None if reads_switch else context_length(model.config) == 20
    engine = make_engine("hf", model=adopt(model), policy="full")
    short = engine.generate([PROMPTS[0], PROMPTS[1]], sampling)
    check_as_exact(eager, short, sampled_logprobs(short), replayed(model, short))
    if reads_switch:
        assert engine.generate([PROMPTS[2]], sampling)
        return
    for prompt in (PROMPTS[2], PROMPTS[1] + [5, 6]):
        with pytest.raises(UserError, match="is too long: the model takes 20, because all its layers have a sliding"):
            engine.generate([prompt], sampling)
    with monkeypatch.context() as unchecked:
        for place in ("rollout.hf", "sparse_rl.attention.interface"):
            unchecked.setattr(f"{place}.check_length", lambda *_: None)
        long = engine.generate([PROMPTS[2]], sampling)
    with torch.no_grad():
        assert largest_difference([plain_logprobs(eager, r) for r in long], sampled_logprobs(long)) > 0.1
        with pytest.raises(UserError, match="a text of 48 tokens is too long"):
            replay_logprobs(model, long)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [4.0, 5.0, 6.0],
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "rope", [LONG_ROPE, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}], ids=["long", "dynamic"]
)
def test_rope_that_depends_on_the_length_limits_the_length(rope: dict[str, Any]) -> None:
    """Up to the original length the frequencies are fixed; a longer text is refused."""
    family = "phi3" if rope["rope_type"] == "longrope" else "llama"
    lengths = {name: n for name, n in rope.items() if name == "original_max_position_embeddings"}
    model = sharpened(new_model(family, max_position_embeddings=128, rope_parameters=dict(rope), **lengths))
    eager, sampling = eager_copy(model), SamplingConfig(8, seed=1, ignore_eos=True)
    longest = rope.get("original_max_position_embeddings", 128)
    assert context_length(model.config) == longest
    engine = make_engine("hf", model=adopt(model), policy="full")
    rollouts = engine.generate(PROMPTS[:2], sampling)
    check_as_exact(eager, rollouts, sampled_logprobs(rollouts), replayed(model, rollouts))
    with pytest.raises(UserError, match=f"the model takes {longest}, because its RoPE of type"):
        engine.generate([[5] * (longest - 4)], sampling)
    assert ("vLLM scales dynamic" in (family_only_hf(model.config) or "")) is (rope["rope_type"] == "dynamic")


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"qkv_bias": True}, "read qkv_bias true (a boolean)"),
        ("llama", {"bias": True}, "read bias true"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"sliding_window": 8}, "sliding_window 8"),
        ("granite", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"head_dim": 32}, "vLLM ignores head_dim"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
            "table for YaRN is shorter than max_position_embeddings",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_vllm_reads_differently_is_sampled_by_hf(family: str, settings: dict[str, Any], reason: str) -> None:
    """Control: without the setting, vllm can sample."""
    config = new_model(family, max_position_embeddings=512).config
    assert family_only_hf(config) is None
    for name, value in settings.items():
        setattr(config, name, value)
    check_replayable(config)
    assert reason in (family_only_hf(config) or "")
    assert NO_WINDOWS not in (family_only_hf(config) or "")


@pytest.mark.parametrize("kind", ["awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_quantized_weights_are_refused(kind: str) -> None:
    config = new_model("llama").config
    check_replayable(config)  # control
    config.quantization_config = {"quant_method": kind}
    with pytest.raises(UserError, match=rf"its weights are quantized \({kind}\); use the model's unquantized weights"):
        check_replayable(config)
