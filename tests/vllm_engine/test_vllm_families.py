"""The vLLM engine computes every supported family as transformers does, and settings that vLLM ignores are refused.

The replay gap compares sampler and trainer under evictions; here a full cache is compared with transformers' eager
attention, on random weights with large queries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eager import eager_copy, largest_difference, plain_logprobs, sampled_logprobs, sharpened
from test_vllm_against_hf import ON_BOTH

from rollout import Rollout, SamplingConfig
from rollout.choice import choose_engine
from rollout.config import RolloutConfig
from rollout.requests import NotFiniteLogprobError
from sparse_rl.attention.families import FAMILIES, UNREAD
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_config
from sparse_rl.policies import make_policy

SHAPE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "num_hidden_layers": 4}
LENGTHS = (1, 4, 11, 28, 66)  # ministral3 scales queries from position 16 on
SAMPLING = SamplingConfig(30, seed=1, ignore_eos=True)
IN_MAKE_TEST = "ministral3"
IGNORED = [  # family, setting, and a value that vLLM ignores
    (family, name, 0.5 if assumed is None else not assumed)
    for family, settings in UNREAD.items()
    for name, assumed in settings.items()
]
READ: list[tuple[str, dict[str, Any]]] = [  # settings of experts that vLLM must read
    *(("qwen3_moe", s) for s in ({"norm_topk_prob": False}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2})),
    *(("qwen2_moe", s) for s in ({"norm_topk_prob": True}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2})),
    *(("glm4_moe", s) for s in ({"norm_topk_prob": False}, {"n_group": 1}, {"n_shared_experts": 2})),
    *(("glm4_moe", s) for s in ({"attention_bias": True}, {"use_qk_norm": True})),
]


@pytest.fixture
def sharp(new_model: Callable, tmp_path: Path) -> Callable[[str], Path]:
    """sharp(family) -> the directory of a model of 4 layers with large queries."""

    def make(family: str) -> Path:
        own = {"no_rope_layers": [1, 0, 1, 0]} if family == "smollm3" else {}
        sharpened(new_model(family, **SHAPE, **own)).save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.fixture
def errors(loaded: Callable) -> Callable[[Path, list[Rollout]], tuple[float, float]]:
    """errors(folder, rollouts) -> the largest difference of the rollouts' log-probs from transformers' eager attention
    in float32, and that of eager attention itself from float64.
    """

    def measure(folder: Path, rollouts: list[Rollout]) -> tuple[float, float]:
        eager = eager_copy(loaded(folder))
        with torch.no_grad():
            plain = [plain_logprobs(eager, r) for r in rollouts]
            exact = [plain_logprobs(eager.double(), r) for r in rollouts]
        return largest_difference(plain, sampled_logprobs(rollouts)), largest_difference(plain, exact)

    return measure


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == IN_MAKE_TEST else pytest.mark.slow) for family in ON_BOTH]
)
def test_a_full_cache_computes_what_transformers_computes(
    family: str,
    sharp: Callable,
    errors: Callable,
    open_engine: Callable,
    policy_of: Callable,
    random_prompts: Callable,
    record_property: Callable,
) -> None:
    """Log-probs differ from those of transformers' eager attention by at most twice its own error, which is its
    difference from the same model in float64. Control: under a window of 8 tokens they differ by at least 0.1.
    """
    folder, prompts = sharp(family), random_prompts(LENGTHS)
    difference, own_error = errors(folder, open_engine("full", folder).generate(prompts, SAMPLING))
    record_property("difference, own error", (difference, own_error))
    assert 1e-7 < own_error < 1e-4
    assert difference <= 2 * own_error
    windowed = policy_of("streaming", budget=8, sinks=0, period=1)
    assert errors(folder, open_engine(windowed, folder).generate(prompts, SAMPLING))[0] > 0.1


@pytest.mark.slow
def test_control_queries_without_their_factor_are_detected(
    sharp: Callable, errors: Callable, open_engine: Callable, random_prompts: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without our correction of vLLM (compat/models.py), log-probs of Ministral 3 differ by at least 0.1."""
    monkeypatch.setattr("rollout.vllm.compat.models.scale_queries", lambda config: None)
    folder = sharp("ministral3")
    assert errors(folder, open_engine("full", folder).generate(random_prompts(LENGTHS), SAMPLING))[0] > 0.1


@pytest.mark.parametrize(("family", "name", "value"), IGNORED)
def test_settings_that_vllm_ignores_are_refused(
    family: str, name: str, value: Any, open_engine: Callable, directory_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that vLLM ignores is refused with an error of one line, and `auto` takes hf. Control: with vLLM's own
    value, `auto` takes vllm.
    """
    monkeypatch.setattr("vllm.LLM", lambda **_: pytest.fail("vLLM was started"))
    folder = directory_of(family, **{name: value})
    reason = f"{family}: vLLM ignores {name} in config.json, and assumes {json.dumps(UNREAD[family][name])}"
    with pytest.raises(UserError) as refusal:
        open_engine("full", folder)
    assert str(refusal.value) == f"model: {reason}; or use the hf engine"
    assert choose_engine(RolloutConfig(), load_config(str(folder)), (), False) == ("hf", f"hf engine ({reason})")
    plain = load_config(str(directory_of(family)))
    assert choose_engine(RolloutConfig(), plain, (), False) == ("vllm", "vllm engine")  # control


def test_an_ignored_setting_that_an_override_sets_is_refused(directory_of: Callable) -> None:
    """The check of the model's own configuration does not see an override. So vLLM's configuration is checked too.
    Control: without the override, it is accepted.
    """
    import vllm

    from rollout.vllm.compat.arguments import engine_arguments
    from rollout.vllm.compat.refusals import refuse_configuration

    arguments = engine_arguments(make_policy("full"), dtype="float32")
    plain, overridden = (
        vllm.EngineArgs(str(directory_of("qwen3")), dtype="float32", hf_overrides=values, **arguments)
        for values in ({}, {"attention_bias": True})
    )
    refuse_configuration(plain.create_engine_config())  # control
    with pytest.raises(UserError, match="qwen3: vLLM ignores attention_bias"):
        refuse_configuration(overridden.create_engine_config())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "value"), IGNORED)
def test_control_vllm_computes_another_function_under_a_setting_that_it_ignores(
    family: str,
    name: str,
    value: Any,
    open_engine: Callable,
    directory_of: Callable,
    random_prompts: Callable,
    replay_gap: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: if the setting were accepted, the replay gap would be at least 0.1, or not finite. If vLLM learns to
    read the setting, this test fails, and the setting can be removed from UNREAD.
    """
    monkeypatch.delitem(UNREAD, family)
    folder = directory_of(family, **{name: value})
    engine = open_engine("full", folder)
    try:
        rollouts = engine.generate(random_prompts(LENGTHS), SAMPLING)
    except NotFiniteLogprobError:  # biases that vLLM expects, and that the files lack, keep arbitrary numbers
        return
    assert replay_gap(rollouts, folder) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), READ, ids=str)
def test_vllm_reads_the_settings_of_experts(
    family: str,
    settings: dict,
    open_engine: Callable,
    new_model: Callable,
    random_prompts: Callable,
    replay_gap: Callable,
    tmp_path: Path,
) -> None:
    """Under each setting, the replay gap is at most 1e-5."""
    new_model(family, **SHAPE, **settings).save_pretrained(tmp_path)
    assert replay_gap(open_engine("full", tmp_path).generate(random_prompts(LENGTHS), SAMPLING), tmp_path) <= 1e-5


def test_every_family_that_vllm_ignores_settings_of_is_supported() -> None:
    assert set(UNREAD) <= set(FAMILIES)
