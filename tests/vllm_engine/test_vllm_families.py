"""The vLLM engine computes every family as transformers does, and refuses settings that vLLM ignores. The replay gap
compares sampler and trainer; here a full cache is compared with eager attention, on large queries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from eager import eager_copy, largest_difference, plain_logprobs, sampled_logprobs, sharpened
from test_vllm_against_hf import ON_BOTH
from ties import replay_gap
from tiny import FOLDER, directory_of, loaded, new_model, policy_of, random_prompts

from rollout import Rollout, SamplingConfig
from rollout.config import RolloutConfig
from rollout.engine import choose_engine
from rollout.sampling import NotFiniteLogprobError
from sparse_rl.attention.families import ANY, EVERY_FAMILY, FAMILIES, READ_BY_ONE
from sparse_rl.config import show
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_config

SHAPE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "num_hidden_layers": 4}
LENGTHS = (1, 4, 11, 28, 66)  # ministral3 scales queries from position 16 on
SAMPLING = SamplingConfig(30, seed=1, ignore_eos=True)
IN_MAKE_TEST = "ministral3"
READ_BY_VLLM = {"attention_sinks", "layer_rope_theta"}  # settings without a value that a tiny model could have
IGNORED = [  # family, setting, and a value that only one of vLLM and transformers reads
    *(
        (family, name, 0.5 if alike is None else 0.01 if name == "rms_norm_eps" else not alike)
        for family, settings in {**READ_BY_ONE, "qwen3": EVERY_FAMILY, "qwen3_moe": EVERY_FAMILY}.items()
        for name, alike in settings.items()
        if alike is not ANY and (name == "attention_bias" if settings is EVERY_FAMILY else name not in READ_BY_VLLM)
    ),
    *(("llama", name, value) for name, value in (("bias", True), ("qkv_bias", True), ("sliding_window", 8))),
    *(("mistral", "attention_bias", True), ("phi3", "attention_bias", True)),
    *(("qwen2", "hidden_act", "gelu"), ("granite", "hidden_act", "gelu")),
]
READ: list[tuple[str, dict[str, Any]]] = [  # settings of experts and biases that vLLM must read
    *(("qwen3_moe", s) for s in ({"norm_topk_prob": False}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2})),
    *(("qwen2_moe", s) for s in ({"norm_topk_prob": True}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2})),
    *(("glm4_moe", s) for s in ({"norm_topk_prob": False}, {"n_group": 1}, {"n_shared_experts": 2})),
    *(("glm4_moe", s) for s in ({"attention_bias": True}, {"use_qk_norm": True})),
    *(("seed_oss", s) for s in ({"attention_bias": False}, {"attention_out_bias": True}, {"mlp_bias": True})),
]


def sharp(family: str) -> Path:
    """Return the directory of a model of 4 layers with large queries."""
    folder, own = Path(mkdtemp(dir=FOLDER.name)), {"no_rope_layers": [1, 0, 1, 0]} if family == "smollm3" else {}
    sharpened(new_model(family, **SHAPE, **own)).save_pretrained(folder)
    return folder


def errors(folder: Path, rollouts: list[Rollout]) -> tuple[float, float]:
    """Return the largest difference of log-probs from eager attention, and that from float64."""
    eager = eager_copy(loaded(folder))
    with torch.no_grad():
        plain = [plain_logprobs(eager, r) for r in rollouts]
        exact = [plain_logprobs(eager.double(), r) for r in rollouts]
    return largest_difference(plain, sampled_logprobs(rollouts)), largest_difference(plain, exact)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == IN_MAKE_TEST else pytest.mark.slow) for family in ON_BOTH]
)
def test_a_full_cache_computes_what_transformers_computes(family: str, open_engine: Callable) -> None:
    """Differences are at most twice eager attention's own from float64. Control: a window of 8 tokens gives 0.1."""
    folder, prompts = sharp(family), random_prompts(LENGTHS)
    difference, own_error = errors(folder, open_engine("full", folder).generate(prompts, SAMPLING))
    assert 1e-7 < own_error < 1e-4
    assert difference <= 2 * own_error
    windowed = policy_of("streaming", budget=8, sinks=0, period=1)
    assert errors(folder, open_engine(windowed, folder).generate(prompts, SAMPLING))[0] > 0.1


@pytest.mark.slow
def test_control_queries_without_their_factor_are_detected(
    open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without `model_arguments`, log-probs of Ministral 3 differ by at least 0.1."""
    monkeypatch.setattr("rollout.vllm.compat.arguments.model_arguments", lambda config: {})
    folder = sharp("ministral3")
    assert errors(folder, open_engine("full", folder).generate(random_prompts(LENGTHS), SAMPLING))[0] > 0.1


@pytest.mark.parametrize(("family", "name", "value"), IGNORED)
def test_settings_that_vllm_ignores_are_refused(
    family: str, name: str, value: Any, open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` takes hf. Control: without the setting, `auto` takes vllm."""
    monkeypatch.setattr("vllm.LLM", lambda **_: pytest.fail("vLLM was started"))
    folder = directory_of(family, **{name: value})
    reason = f"{family}: vLLM and transformers read {name} {show(value)} in config.json differently"
    with pytest.raises(UserError) as refusal:
        open_engine("full", folder)
    assert str(refusal.value) == f"model: {reason}; or use the hf engine"
    assert choose_engine(RolloutConfig(), load_config(str(folder)), (), False) == ("hf", f"hf engine ({reason})")
    plain = load_config(str(directory_of(family)))
    assert choose_engine(RolloutConfig(), plain, (), False) == ("vllm", "vllm engine")  # control


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "value"), [row for row in IGNORED if row[1] not in ("bias", "qkv_bias")]
)  # biases that only vLLM reads are in no file: they keep arbitrary numbers, which may be 0
def test_control_vllm_computes_another_function_under_a_setting_that_it_ignores(
    family: str, name: str, value: Any, open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If vLLM learns to read the setting, this test fails, and the setting can be removed from the tables."""
    monkeypatch.setitem(READ_BY_ONE, family, {**READ_BY_ONE.get(family, {}), name: ANY})
    folder = directory_of(family, **{name: value})
    try:
        rollouts = open_engine("full", folder).generate(random_prompts(LENGTHS), SAMPLING)
    except (NotFiniteLogprobError, ValueError):  # biases that the files lack are arbitrary; vLLM knows only silu
        return
    assert replay_gap(rollouts, folder) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), READ, ids=str)
def test_vllm_reads_the_settings_of_experts_and_biases(
    family: str, settings: dict, open_engine: Callable, tmp_path: Path
) -> None:
    new_model(family, **SHAPE, **settings).save_pretrained(tmp_path)
    assert replay_gap(open_engine("full", tmp_path).generate(random_prompts(LENGTHS), SAMPLING), tmp_path) <= 1e-5


def test_every_family_with_settings_of_one_reader_is_supported() -> None:
    assert set(READ_BY_ONE) <= set(FAMILIES)


FACTORS = {"short_factor": [1.0 + i / 10 for i in range(12)], "long_factor": [4.0 + i for i in range(12)]}
LONG = {"rope_type": "longrope", **FACTORS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": 100}),
        ("starcoder2", {"sliding_window": 100, "use_bias": True}),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 100, "max_position_embeddings": 400}),
    ],
    ids=str,
)
def test_vllm_reads_a_limited_model_up_to_its_length(
    family: str, settings: dict, open_engine: Callable, tmp_path: Path
) -> None:
    """A window of all layers, and RoPE that depends on the length: exact up to 100 tokens, refused beyond."""
    new_model(family, **SHAPE, **settings).save_pretrained(tmp_path)
    engine = open_engine("full", tmp_path)
    assert engine.max_model_len == 100
    assert replay_gap(engine.generate(random_prompts(LENGTHS), SAMPLING), tmp_path) <= 1e-5
    with pytest.raises(UserError, match="max_model_len 100"):
        engine.generate(random_prompts((80,)), SAMPLING)
