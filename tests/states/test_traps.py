"""Hybrid families: traps of transformers' code, what is refused, and how states are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eager import sampled_logprobs
from hybrid import SIZE, VARIANTS, build, hybrid, prompts
from judging import trainer_gap, wrong_traces
from planned import GRPO, plan
from tiny import new_model, policy_of
from transformers import AutoConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from rollout import SamplingConfig, make_engine
from rollout.config import RolloutConfig
from rollout.context import PromptCacheConfig
from rollout.engine import choose_engine
from sparse_rl.attention.families import HYBRID, MISSING, cache_shape, check_replayable, family_only_hf, global_layers
from sparse_rl.attention.interface import NO_MASK, KVView, adopt
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.experts import has_experts
from sparse_rl.kernels.exact import sdpa
from sparse_rl.methods.triattention.policy import measure_centres
from sparse_rl.models.load import head_of, load_model
from sparse_rl.recipe import make_recipe
from sparse_rl.states import mamba2, mixers
from sparse_rl.states.mixers import State
from sparse_rl.trace import TraceError
from trainer.sft import make_trainer

GKV = {"budget": 12, "window": 4, "period": 4}
SAMPLING = SamplingConfig(max_tokens=30, seed=1, ignore_eos=True)


def rollouts_of(model: Any) -> Any:
    return make_engine("hf", model=model, policy=policy_of("gkv", **GKV)).generate(prompts(2, 9, 30), SAMPLING)


# ---- transformers' code ----------------------------------------------------------------------------------------------


def test_a_step_keeps_the_limits_of_time_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own step ignores them. Control: so does ours without them."""
    model = adopt(build("granite_nope", time_step_limit=(0.001, 0.1)))
    rollouts = rollouts_of(model)
    assert trainer_gap(model, rollouts) <= 1e-5
    with monkeypatch.context() as patched:
        patched.setattr(mamba2, "_time_steps", lambda dt, bias, limits: plain(dt, bias, mamba2.UNLIMITED))
        assert trainer_gap(model, rollouts) >= 1  # control


plain = mamba2._time_steps


@pytest.mark.parametrize(
    ("name", "setting"), [("granite_nope", {"logits_scaling": 8.0}), ("falcon_h1", {"lm_head_multiplier": 0.25})]
)
def test_engine_and_heads_scale_the_logits(name: str, setting: dict[str, float]) -> None:
    """Control: without the factor, the head's log-probs are far off."""
    model = adopt(build(name, **setting))
    ids = torch.tensor(prompts(30))
    assert trainer_gap(model, rollouts_of(model)) <= 1e-5
    with torch.no_grad():
        hidden = model.get_decoder()(ids).last_hidden_state
        wanted = model(ids).logits.log_softmax(-1)
        assert (head_of(model)(hidden).log_softmax(-1) - wanted).abs().max() <= 1e-5
        assert (model.get_output_embeddings()(hidden).log_softmax(-1) - wanted).abs().max() >= 1  # control


def test_a_gate_behind_a_step_is_that_behind_a_scan() -> None:
    """Falcon-H1 hands its gate to the step, which must round before it gates, as after a scan."""
    model = hybrid("falcon_h1")
    assert trainer_gap(model, rollouts_of(model)) <= 1e-6


def test_each_layer_is_asked_for_its_own_state() -> None:
    """OLMo asks for no layer in particular. A state answers for itself before its prompt, and after it."""
    state = State()
    assert not state.has_previous_state()
    state.update_conv_state(torch.ones(1, 2, 3), 0, conv_kernel_size=4)
    assert state.has_previous_state()
    assert state.has_previous_state(3)
    assert state.layers[3] is state
    assert state.conv_states[0].tolist() == [[[0.0, 1.0, 1.0, 1.0]] * 2]


def test_a_dense_model_with_keys_of_experts_has_no_experts() -> None:
    """Then TRL's balancing loss, which a coefficient in config.json switches on, is switched off."""
    model = hybrid("granite_nope")
    assert model.config.router_aux_loss_coef > 0
    assert not has_experts(model)
    assert has_experts(hybrid("granite_experts"))


def test_a_mixer_without_a_named_function_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {**mamba2.FUNCTIONS, "mamba2_renamed": mamba2.scan}
    monkeypatch.setattr(mamba2, "FUNCTIONS", functions)
    mixers._subclass.cache_clear()
    with pytest.raises(StoppedError, match=r"BambaMixer of this version of transformers does not use mamba2_renamed"):
        adopt(build("bamba"))
    mixers._subclass.cache_clear()


def test_a_state_in_bfloat16_is_refused() -> None:
    with pytest.raises(StoppedError, match=r"layer 3 has a state in torch\.bfloat16"):
        State().update_recurrent_state(torch.zeros(1, 2, dtype=torch.bfloat16), 3)
    State().update_recurrent_state(torch.zeros(1, 2), 3)  # control


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba"])
@pytest.mark.few(2)
def test_a_model_in_bfloat16_samples_near_its_replay(name: str) -> None:
    """With transformers' own functions; the guard measures the gap. Control: nothing evicted."""
    model = adopt(build(name).to(torch.bfloat16))
    rollouts = rollouts_of(model)
    with torch.no_grad():
        replayed = torch.cat(replay_logprobs(model, rollouts))
    assert (replayed - torch.cat(sampled_logprobs(rollouts))).abs().mean() <= 0.1
    assert trainer_gap(model, wrong_traces(rollouts)["causal"]) >= 0.5


# ---- refusals --------------------------------------------------------------------------------------------------------


class Causal(KVView):
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> Any:
        return sdpa(query, key, value, scaling, causal=True)


def test_a_view_that_names_no_sequences_is_refused() -> None:
    ids = torch.tensor(prompts(9))
    with pytest.raises(TraceError, match="Causal does not say where sequences begin, which the model's layers"):
        hybrid("lfm2")(ids, attention_mask=NO_MASK, kv_view=Causal(), use_cache=False)
    view = Causal()
    view.states = mixers.Sequences.right_padded([9])
    hybrid("lfm2")(ids, attention_mask=NO_MASK, kv_view=view, use_cache=False)  # control


@pytest.mark.parametrize("name", VARIANTS)
def test_vllm_is_refused_in_one_line(name: str) -> None:
    config = hybrid(name).config
    assert "our vLLM plugin lacks hybrid families, whose layers with a state" in (family_only_hf(config) or "")
    assert choose_engine(RolloutConfig(), config, (), True)[0] == "hf"
    with pytest.raises(UserError, match=r"plugin lacks hybrid families.* use the engine hf"):
        choose_engine(RolloutConfig(engine="vllm"), config, (), True)


def test_contexts_are_refused() -> None:
    engine = make_engine("hf", model=hybrid("lfm2"), policy="full")
    refused = "a compacted context holds no states, and lfm2 has layers with a state"
    with pytest.raises(UserError, match=refused):
        engine.compact(prompts(60)[0], PromptCacheConfig())
    context = make_engine("hf", model=new_model("qwen3"), policy="full").compact(prompts(60)[0], PromptCacheConfig())
    with pytest.raises(UserError, match=refused):
        engine.generate(prompts(5), SAMPLING, context)


def test_policies_that_read_more_than_attention_are_refused() -> None:
    with pytest.raises(UserError, match="queries that differ by RoPE alone, and lfm2 has layers with a state"):
        measure_centres(hybrid("lfm2"), prompts(40)[0])


def test_models_without_keys_and_families_that_are_not_exact_are_refused() -> None:
    with pytest.raises(UserError, match="no layer has keys and values, so there is nothing to evict"):
        check_replayable(new_model("bamba", attn_layer_indices=None).config)
    with pytest.raises(UserError, match="mamba_rms_norm is true"):
        check_replayable(AutoConfig.for_model("falcon_h1", mamba_rms_norm=True))
    kinds = ["linear_attention", "full_attention", "moe"]
    with pytest.raises(UserError, match="its experts have not been tested"):
        check_replayable(AutoConfig.for_model("nemotron_h", layers_block_type=kinds))
    assert not {*HYBRID} & {*MISSING}
    for family in ("kimi_linear", "minimax", "jamba", "zamba2"):
        assert "\n" not in MISSING[family]


@pytest.mark.parametrize("packing", [True, False])
def test_sft_does_not_pack(packing: bool, tmp_path: Path) -> None:
    from sparse_rl.data.problems import load_data
    from sparse_rl.data.synthetic import EOS_ID, PAD_ID, RunningSum
    from sparse_rl.models.load import load_tokenizer
    from trainer.arguments import model_options

    new_model("lfm2", eos_token_id=EOS_ID, pad_token_id=PAD_ID).save_pretrained(tmp_path / "m")
    RunningSum.tokenizer().save_pretrained(tmp_path / "m")
    recipe: Any = make_recipe(
        {
            "kind": "sft",
            "model": str(tmp_path / "m"),
            "output_dir": str(tmp_path),
            "dtype": "float32",
            "data": {"synthetic": {"task": "running_sum", "size": 24, "n": 4}},
            "packing": packing,
            "max_length": 160,
        }
    )
    tokenizer = load_tokenizer(recipe.model)
    data = load_data(recipe.data, tokenizer, require=("prompt", "completion"))
    options = {"model_init_kwargs": model_options("float32"), **recipe.training_arguments()}
    arguments = recipe.model, recipe.sft, options, tokenizer, data, None, []
    if not packing:
        assert make_trainer(*arguments)
        return
    with pytest.raises(UserError, match="the texts of a packed row would share one state, and lfm2 has layers with"):
        make_trainer(*arguments)


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_records_count_layers_with_keys() -> None:
    """Of the 48 layers of Qwen3-Next, 12."""
    config = AutoConfig.for_model("qwen3_next")
    assert cache_shape(config) == (12, 2, 256)
    assert global_layers(config) == list(range(3, 48, 4))
    (rollout,) = make_engine("hf", model=hybrid("nemotron_h"), policy="full").generate(prompts(9), SAMPLING)
    assert rollout.trace.layers == 2


def test_doctor_counts_states() -> None:
    """The states of Qwen3-Next take 75.5 MB a sequence, as much as 3,072 entries of its cache in bfloat16."""
    model = hybrid("qwen3_next")
    recipe = make_recipe(GRPO)
    (item,) = (item for item in plan(recipe, model.config).items if item.name.startswith("states of"))
    engine = make_engine("hf", model=model, policy=policy_of("streaming", budget=32, period=8))
    cache = engine.prefill(prompts(9)).cache
    sequences = min(recipe.rollout.max_batch, recipe.sequences())
    assert item.device == sequences * cache.states.allocated_bytes()
    config = AutoConfig.for_model("qwen3_next")
    large = plan(make_recipe({**GRPO, "dtype": "bfloat16"}), config, cuda=True)
    (item,) = (item for item in large.items if item.name.startswith("states of"))
    recurrent, inputs = 36 * 32 * 128 * 128 * 4, 36 * (2 * 16 * 128 + 32 * 128) * 4 * 2
    assert recurrent == 75_497_472 == 3072 * 12 * 2 * 2 * 256 * 2
    assert item.device == sequences * (recurrent + inputs)
    assert "77.9 MB per sequence (75.5 MB recurrent), as much as 3,168 entries of the cache: under a" in item.note
    dense = plan(recipe, new_model("qwen3").config)
    assert not any(item.name.startswith("states of") for item in dense.items)  # control


def test_the_text_part_of_a_qwen3_5_directory_is_used(tmp_path: Path) -> None:
    """Its logits are those of the multimodal model, and a saved model is a text model. Control: other weights."""
    text = {**SIZE, **VARIANTS["qwen3_5_text"], "vocab_size": 64}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config={**text, "rope_parameters": rope}, vision_config=vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    ids = torch.tensor(prompts(20))
    model = load_model(tmp_path / "whole").eval()
    assert model.config.model_type == "qwen3_5_text"
    with torch.no_grad():
        wanted = whole(input_ids=ids).logits
        assert (model(input_ids=ids).logits - wanted).abs().max() <= 1e-5
        model.save_pretrained(tmp_path / "saved")
        again = load_model(tmp_path / "saved").eval()
        assert (again(input_ids=ids).logits - wanted).abs().max() <= 1e-5
        again.get_decoder().layers[0].linear_attn.conv1d.weight.zero_()
        assert (again(input_ids=ids).logits - wanted).abs().max() >= 1e-4  # control
    assert trainer_gap(model, rollouts_of(model)) <= 1e-5
