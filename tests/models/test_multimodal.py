"""A directory of a multimodal Gemma 3 is used as a model of its text part, in both layouts of its files."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from damaging import refusal
from judging import in_one_line
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from rollout import SamplingConfig, make_engine
from rollout.config import RolloutConfig
from rollout.engine import choose_engine
from rollout.sampling import stop_tokens
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.main import main
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import UserError
from sparse_rl.models.directory import INDEX, WEIGHTS
from sparse_rl.models.load import (
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    load_weights,
    model_fingerprint,
    untrained_model,
)
from sparse_rl.models.weights import check_weights, identify, stored_shapes
from sparse_rl.policies import make_policy

ENDS = [1, 106]  # end-of-sequence tokens of the published Gemma 3
TEXT = {
    "vocab_size": RunningSum.vocabulary,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 8,
    "layer_types": ["full_attention"] * 2,
    "initializer_range": 0.1,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,  # more than the text part has
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
LAYOUTS = {"published": True, "module's": False}  # layout -> value of save_original_format
PREFIX = {"published": "language_model.model.", "module's": "model.language_model."}
SFT = """
model: model
output_dir: out
dtype: float32
data: {synthetic: {task: running_sum, size: 8}}
max_steps: 2
save_steps: 1
learning_rate: 1.0e-3
"""
GRPO = f"""{SFT}
rewards: ["test_multimodal:digits"]
cache: {{policy: streaming, budget: 16, period: 4}}
per_device_train_batch_size: 4
num_generations: 2
max_completion_length: 24
gradient_checkpointing: false
beta: 0.1
"""


def digits(completions: list[str], **_: Any) -> list[float]:
    """Return a reward that differs between random completions: the number of digits."""
    return [float(sum(letter.isdigit() for letter in completion)) for completion in completions]


@cache
def build(tied: bool = True, seed: int = 0) -> Gemma3ForConditionalGeneration:
    """Return a tiny multimodal model whose norms are random, too."""
    sizes = {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4}
    ends = {"eos_token_id": ENDS, "image_token_index": RunningSum.vocabulary - 1}
    config = Gemma3Config(**sizes, **ends, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Gemma3ForConditionalGeneration(config).eval()
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.add_(0.1 * torch.randn_like(weight))
    return model


def save(model: Any, folder: Path, layout: str = "published", **options: Any) -> Path:
    model.save_pretrained(folder, save_original_format=LAYOUTS[layout], **options)
    return folder


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def folder(layout: str, tied: bool, tmp_path: Path) -> Path:
    return save(build(tied), tmp_path / "multimodal", layout)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two recipes and a multimodal model with a tokenizer."""
    monkeypatch.chdir(tmp_path)
    save(build(), tmp_path / "model")
    RunningSum.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "grpo.yaml").write_text(f"kind: grpo{GRPO}")
    (tmp_path / "sft.yaml").write_text(f"kind: sft{SFT}")
    return tmp_path


def difference(model: Any, other: Any) -> float:
    """Return the largest difference between the logits of two models for a batch of random texts."""
    ids = torch.randint(3, RunningSum.vocabulary - 1, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float((model(input_ids=ids).logits - other(input_ids=ids).logits).abs().max())


def edit(folder: Path, **settings: Any) -> Path:
    """Replace settings in config.json of a directory; None removes a setting."""
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **settings}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return folder


# ---- loading -------------------------------------------------------------------------------------------------------


def test_the_text_part_computes_the_multimodal_models_logits(folder: Path, layout: str, tied: bool) -> None:
    """Control: the logits of a model with other weights are different."""
    assert any(name.startswith(PREFIX[layout]) for name in load_file(folder / WEIGHTS))
    model = load_model(folder)
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert difference(model, build(tied)) <= 1e-5
    assert difference(model, build(tied, seed=1)) > 0.1
    check_weights(load_config(str(folder)), str(folder))
    # the head is tied as in the multimodal model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert any("lm_head" in name for name in load_file(folder / WEIGHTS)) != tied
    assert load_config(str(folder)).tie_word_embeddings == tied


def test_load_weights_reads_the_text_part(folder: Path, tied: bool) -> None:
    model = untrained_model(folder, seed=5)
    assert difference(model, build(tied)) > 0.1
    lacking = load_weights(model, folder)
    assert difference(model, build(tied)) <= 1e-5
    assert lacking.unexpected_keys == []
    assert set(lacking.missing_keys) <= {"lm_head.weight"}


def test_an_untrained_model_has_the_text_part_alone(tmp_path: Path) -> None:
    folder = save(build(), tmp_path / "multimodal")
    model, other = untrained_model(folder, seed=5), untrained_model(folder, seed=6)
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"model"}
    assert not [name for name, _ in model.named_parameters() if "vision" in name]
    assert difference(model, untrained_model(folder, seed=5)) == 0
    assert difference(model, other) > 0.1
    assert model.generation_config.eos_token_id == ENDS


# ---- configuration -------------------------------------------------------------------------------------------------


def test_settings_outside_of_text_config_are_kept(tmp_path: Path) -> None:
    """An old name for the dtype, and the end-of-sequence tokens. Control: without them there is transformers' one."""
    folder = save(build(), tmp_path / "multimodal")
    whole = str(edit(folder, dtype=None, torch_dtype="bfloat16", text_config={**TEXT, "model_type": "gemma3_text"}))
    config = load_config(whole)
    assert config.model_type == "gemma3_text"
    assert config.eos_token_id == ENDS
    assert config.dtype == torch.bfloat16
    assert config.name_or_path == whole
    assert stop_tokens(SamplingConfig(1), load_generation_config(whole), config) == ENDS
    further = {"bos_token_id": 7, "pad_token_id": 8}
    copied = Path(shutil.copytree(folder, tmp_path / "further"))
    config = load_config(str(edit(copied, **further)))
    assert {name: getattr(config, name) for name in further} == further
    with pytest.raises(UserError, match=r"its weights are quantized \(fp8\)"):
        load_config(str(edit(copied, quantization_config={"quant_method": "fp8"})))
    (folder / "generation_config.json").unlink()
    assert stop_tokens(SamplingConfig(1), None, load_config(whole)) == ENDS
    assert load_model(whole).generation_config.eos_token_id == ENDS
    edit(folder, eos_token_id=None)
    assert stop_tokens(SamplingConfig(1), None, load_config(whole)) == [1]


def test_sizes_in_text_config_are_checked(tmp_path: Path) -> None:
    """Otherwise transformers would make a list of as many layers."""
    folder = save(build(), tmp_path / "multimodal")
    edit(folder, text_config={**TEXT, "num_hidden_layers": 1001, "layer_types": None})
    line = in_one_line(lambda: load_config(str(folder)))
    assert isinstance(line, str)
    assert "num_hidden_layers is 1001 in config.json" in line


@pytest.mark.parametrize("damage", [3, "a", [1], {"model_type": "gemma3_text", "hidden_size": "a"}, {}])
def test_a_damaged_text_config_gives_one_line(damage: Any, tmp_path: Path) -> None:
    folder = edit(save(build(), tmp_path / "multimodal"), text_config=damage)
    assert isinstance(in_one_line(lambda: check_weights(load_config(str(folder)), str(folder))), str)
    in_one_line(lambda: identify(folder))


@pytest.mark.parametrize("family", ["mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llama4", "gemma3n"])
def test_other_multimodal_families_are_refused(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot be replayed: it reads images or sound, and only text is supported"):
        load_config(str(tmp_path))


# ---- files ---------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_that_of_the_text_part(folder: Path, tied: bool, tmp_path: Path) -> None:
    """Directory, shards, modules and saved text checkpoints have one fingerprint, and other weights another."""
    expected = identify(folder).fingerprint
    assert len(expected) == 16
    save(build(tied), tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / INDEX).is_file()
    assert identify(tmp_path / "shards").fingerprint == expected
    for dtype in ("float32", "bfloat16"):
        model = load_model(folder, dtype)
        assert identify(model).fingerprint == expected
        model.save_pretrained(tmp_path / dtype)
        assert identify(tmp_path / dtype).fingerprint == expected
    assert identify(save(build(tied, seed=1), tmp_path / "other")).fingerprint not in ("", expected)
    torch.nn.init.normal_(model.model.norm.weight)
    assert identify(model).fingerprint != expected


def test_layers_behind_the_last_one_do_not_count(folder: Path, layout: str) -> None:
    """transformers does not load them. Control: a tensor of another layer counts."""
    weights = load_file(folder / WEIGHTS)
    name = f"{PREFIX[layout]}layers.1.input_layernorm.weight"
    expected = identify(folder).fingerprint
    for layer, counts in ((2, False), (1, True)):
        changed = {**weights, name.replace(".1.", f".{layer}."): torch.ones(32)}
        save_file(changed, folder / WEIGHTS, {"format": "pt"})
        assert (identify(folder).fingerprint != expected) == counts


def test_missing_and_misshaped_text_weights_are_refused(folder: Path, layout: str) -> None:
    """Other parts may lack weights, and may have other shapes."""
    stored = f"{PREFIX[layout]}layers.1.self_attn.q_proj.weight"
    name = "model.layers.1.self_attn.q_proj.weight"
    assert refusal(folder, lambda weights: None) is None
    line = refusal(folder, lambda weights: weights.pop(stored))
    assert line == f"model: the weights of {folder.with_name('changed')} lack {name}, which its config.json requires"
    line = refusal(folder, lambda weights: weights.update({stored: torch.zeros(3, 3)}))
    assert line is not None
    assert f"{name} of {folder.with_name('changed')} has shape [3, 3], but [128, 32]" in line
    vision = next(name for name in load_file(folder / WEIGHTS) if "patch_embedding.weight" in name)
    assert refusal(folder, lambda weights: weights.pop(vision)) is None
    assert refusal(folder, lambda weights: weights.update({vision: torch.zeros(3, 3)})) is None


def test_a_head_that_is_not_tied_must_be_stored(layout: str, tmp_path: Path) -> None:
    folder = save(build(tied=False), tmp_path / "multimodal", layout)
    head = {"published": "language_model.lm_head.weight", "module's": "lm_head.weight"}[layout]
    line = refusal(folder, lambda weights: weights.pop(head))
    assert line is not None
    assert "lack lm_head.weight" in line


def test_a_saved_text_part_is_a_plain_model(folder: Path, tied: bool, tmp_path: Path) -> None:
    """Its files have the names of a text model, plain transformers loads it, and it loads again as here."""
    first, place = load_model(folder), tmp_path / "saved"
    first.save_pretrained(place)
    content = json.loads((place / "config.json").read_text())
    assert content["model_type"] == "gemma3_text"
    assert content["architectures"] == ["Gemma3ForCausalLM"]
    assert content["eos_token_id"] == ENDS
    assert "vision_config" not in content
    shapes = stored_shapes(place)
    assert shapes is not None
    assert set(load_file(place / WEIGHTS)) == set(shapes)
    assert {name.split(".")[0] for name in shapes} == ({"model"} if tied else {"model", "lm_head"})
    check_weights(load_config(str(place)), str(place))
    assert difference(AutoModelForCausalLM.from_pretrained(place), first) == 0
    assert difference(load_model(place), build(tied)) <= 1e-5
    assert load_model(place).generation_config.eos_token_id == ENDS
    assert model_fingerprint(load_config(str(place))) == model_fingerprint(load_config(str(folder)))


# ---- engines and commands ------------------------------------------------------------------------------------------


def test_rollouts_from_a_multimodal_directory_are_replayed_exactly(folder: Path) -> None:
    engine = make_engine("hf", model=folder, policy=make_policy("streaming", budget=8, period=2))
    rollouts = engine.generate([[3, 4, 5, 6, 7]] * 2, SamplingConfig(16, seed=0, ignore_eos=True))
    assert any(rollout.trace.evict_at.min() < 20 for rollout in rollouts)
    for rollout, logprobs in zip(rollouts, replay_logprobs(load_model(folder), rollouts), strict=True):
        assert (logprobs.detach() - torch.tensor(rollout.logprobs)).abs().max() <= 1e-5


def test_vllm_is_refused_and_auto_takes_hf(tmp_path: Path) -> None:
    config = load_config(str(save(build(), tmp_path / "multimodal")))
    with pytest.raises(UserError, match="vLLM would load all parts of the multimodal model; use the engine hf") as line:
        choose_engine(RolloutConfig(engine="vllm"), config, [], cuda=False)
    assert str(line.value).startswith("rollout.engine: gemma3_text: ")
    name, reason = choose_engine(RolloutConfig(engine="auto"), config, [], cuda=False)
    assert name == "hf"
    assert "multimodal" in reason


def test_the_tokenizer_is_found_in_a_multimodal_directory(workdir: Path) -> None:
    expected = RunningSum.tokenizer()("Q12?")["input_ids"]
    assert load_tokenizer("model")("Q12?")["input_ids"] == expected
    file = workdir / "model" / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"processor_class": "Gemma3Processor"}
    file.write_text(json.dumps(settings))
    assert load_tokenizer("model")("Q12?")["input_ids"] == expected


@pytest.mark.parametrize("words", [["train", "grpo.yaml", "--dry-run"], ["doctor", "grpo.yaml"]], ids=" ".join)
def test_the_user_reads_that_the_text_part_is_used(
    words: list[str], workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    """Control: a text model has no such remark."""
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "model: gemma3_text, 2 layers, 2 kv heads of 32, the text part of a multimodal model" in out
    load_model("model").save_pretrained("text")
    RunningSum.tokenizer().save_pretrained("text")
    assert main([*words, "model=text"]) == 0
    assert "multimodal" not in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["grpo.yaml", "sft.yaml"])
@pytest.mark.few(1)
def test_a_trained_model_is_a_text_model(recipe: str, workdir: Path) -> None:
    """TRL loads the model, and the reference model of GRPO. A run that is resumed ends with the same weights."""
    assert main(["train", recipe]) == 0
    trained = workdir / "out" / "model"
    assert json.loads((trained / "config.json").read_text())["model_type"] == "gemma3_text"
    assert set(load_generation_config(trained).eos_token_id) == set(ENDS)
    check_weights(load_config(str(trained)), str(trained))
    assert 0 < difference(load_model(trained), build()) < 1
    expected = identify(trained).fingerprint
    assert expected != identify("model").fingerprint
    for folder in (trained, workdir / "out" / "checkpoint-2"):
        shutil.rmtree(folder)
    assert main(["train", recipe, "--resume"]) == 0
    assert identify(trained).fingerprint == expected
