"""The weights of mixture-of-experts models: files name the matrices of every expert, and a module holds them in one
tensor. A file that lacks an expert, or has a wrong one, is refused; a complete one has the fingerprint of its module.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from damaging import refusal
from safetensors.torch import load_file, save_file
from tiny import new_model
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparse_rl.models import load
from sparse_rl.models.directory import WEIGHTS
from sparse_rl.models.load import load_weights, read_model
from sparse_rl.models.weights import identify

# family -> name of a layer's experts on the hub, and the names of an expert's gate, up and down projection
ON_HUB = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen2_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "olmoe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "glm4_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(params=ON_HUB)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    return new_model(family)


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def as_on_the_hub(model: PreTrainedModel, family: str) -> dict[str, Tensor]:
    """Return the model's weights under the hub's names, split by hand."""
    block, (gate, up, down) = ON_HUB[family]
    weights: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        layer = name.split(".mlp.")[0]
        if name.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(weight):
                for part, matrix in zip((gate, up), both.chunk(2), strict=True):
                    weights[f"{layer}.{block}.{expert}.{part}.weight"] = matrix.clone()
        elif name.endswith(".experts.down_proj"):
            for expert, matrix in enumerate(weight):
                weights[f"{layer}.{block}.{expert}.{down}.weight"] = matrix.clone()
        else:
            weights[name.replace(".mlp.gate.", f".{block.split('.')[0]}.gate.")] = weight
    return weights


def test_saved_models_have_the_names_of_the_hub(family: str, model: PreTrainedModel, folder: Path) -> None:
    """Such a directory is accepted, and loads as the same model."""
    expected, stored = as_on_the_hub(model, family), load_file(folder / WEIGHTS)
    assert expected.keys() == stored.keys()
    assert all(torch.equal(expected[name], weight) for name, weight in stored.items())
    assert refusal(folder, lambda weights: None) is None
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())


def test_the_names_of_modules_and_of_a_decoder_are_accepted(model: PreTrainedModel, folder: Path) -> None:
    """`save_original_format=False` writes the names of the module. A decoder's names lack the prefix `model.`."""
    model.save_pretrained(folder, save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(folder / WEIGHTS)
    assert refusal(folder, lambda weights: None) is None
    wrong = {"model.layers.1.mlp.experts.down_proj": torch.zeros(7, 32, 24)}
    assert "model.layers.1.mlp.experts.down_proj of" in str(refusal(folder, lambda weights: weights.update(wrong)))
    model.save_pretrained(folder)

    def without_prefix(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    assert refusal(folder, without_prefix) is None


@pytest.mark.parametrize("expert", [0, 3, 7])
@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.few(15)
def test_a_missing_matrix_of_an_expert_is_named(family: str, folder: Path, expert: int, part: int) -> None:
    block, parts = ON_HUB[family]
    name = f"model.layers.1.{block}.{expert}.{parts[part]}.weight"
    message = str(refusal(folder, lambda weights: weights.pop(name)))
    assert f"lack {name}, which its config.json requires" in message


def test_wrong_shapes_of_experts_and_routers_are_named(family: str, folder: Path) -> None:
    block, (gate, _, down) = ON_HUB[family]
    router = f"model.layers.1.{block.split('.')[0]}.gate.weight"
    stored = load_file(folder / WEIGHTS)
    for name in (f"model.layers.1.{block}.5.{gate}.weight", f"model.layers.1.{block}.0.{down}.weight", router):
        rows, columns = stored[name].shape
        wrong = {name: torch.zeros(rows + 1, columns)}
        message = str(refusal(folder, lambda weights, wrong=wrong: weights.update(wrong)))
        assert f"{name} of" in message
        assert f"has shape [{rows + 1}, {columns}], but [{rows}, {columns}] by its config.json" in message
    assert f"lack {router}" in str(refusal(folder, lambda weights: weights.pop(router)))


def test_an_expert_too_many_is_named(family: str, folder: Path) -> None:
    """Transformers would append it to the tensor of experts. Control: tensors that no module has are accepted."""
    block, (gate, _, _) = ON_HUB[family]
    first, further = (f"model.layers.1.{block}.{expert}.{gate}.weight" for expert in (0, 8))
    wrong = str(refusal(folder, lambda weights: weights.update({further: weights[first].clone()})))
    assert f"{further} of" in wrong
    assert "does not belong to the model" in wrong
    behind = {f"model.layers.9.{block}.0.{gate}.weight": torch.zeros(4, 4), "model.something": torch.zeros(1)}
    assert refusal(folder, lambda weights: weights.update(behind)) is None


def test_the_bias_of_a_router_is_required(tmp_path: Path) -> None:
    """It is a buffer, not a parameter. Transformers would replace a missing one by zeros."""
    new_model("glm4_moe").save_pretrained(tmp_path / "model")
    assert refusal(tmp_path / "model", lambda weights: None) is None
    assert f"lack {BIAS}" in str(refusal(tmp_path / "model", lambda weights: weights.pop(BIAS)))


# ---- fingerprints ----------------------------------------------------------------------------------------------------


def fingerprint(model: object) -> str:
    return identify(model).fingerprint


def test_a_directory_and_its_modules_have_one_fingerprint(model: PreTrainedModel, folder: Path) -> None:
    """This holds for the hub's names, the module's names, shards in any order, and bfloat16."""
    expected = fingerprint(model)
    assert len(expected) == 16
    assert fingerprint(folder) == expected
    for index, options in enumerate(({"max_shard_size": "20KB"}, {"save_original_format": False})):
        model.save_pretrained(folder.with_name(str(index)), **options)
        assert fingerprint(folder.with_name(str(index))) == expected
    assert len(list(folder.with_name("0").glob("*.safetensors"))) > 1
    for dtype in (torch.float32, torch.bfloat16):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert fingerprint(loaded) == expected
        loaded.save_pretrained(folder.with_name("loaded"))
        assert fingerprint(folder.with_name("loaded")) == expected


def test_the_gate_and_the_down_projection_of_the_first_expert_count(model: PreTrainedModel, folder: Path) -> None:
    expected = fingerprint(model)
    for name, weight in model.named_parameters():
        if "layers.1" in name and (".experts." in name or ".gate." in name):
            kept = weight.detach().clone()
            weight.data[(0,) * (weight.dim() - 1)] += 1
            assert fingerprint(model) != expected, name
            model.save_pretrained(folder)
            assert fingerprint(folder) == fingerprint(model)
            weight.data.copy_(kept)
    assert fingerprint(model) == expected


def test_a_routers_bias_counts_and_layers_behind_the_last_do_not(tmp_path: Path) -> None:
    """Checkpoints of GLM-4.5 have one more layer, which predicts a second token."""
    model = new_model("glm4_moe")
    model.save_pretrained(tmp_path)
    expected = fingerprint(tmp_path)
    assert expected == fingerprint(model)
    weights = load_file(tmp_path / WEIGHTS)
    further = {name.replace("layers.2.", "layers.3."): value for name, value in weights.items() if "layers.2." in name}
    save_file({**weights, **{name: value.clone() for name, value in further.items()}}, tmp_path / WEIGHTS)
    assert fingerprint(tmp_path) == expected
    model.state_dict()[BIAS].fill_(0.5)
    assert fingerprint(model) != expected


@pytest.mark.few(2)
def test_a_checkpoint_is_loaded_with_one_copy_in_memory(
    folder: Path, model: PreTrainedModel, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are read into a model that exists, with one further copy; a tensor beside the model's is read, too."""
    target, held = new_model(family, seed=1), list[int]()
    target.register_parameter("scorer", torch.nn.Parameter(torch.zeros(3)))
    save_file({**load_file(folder / WEIGHTS), "scorer": torch.ones(3)}, folder / WEIGHTS, {"format": "pt"})

    def bytes_of_tensors() -> int:
        gc.collect()
        tensors = (t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter))
        storages = [t.untyped_storage() for t in tensors if not is_functorch_wrapped_tensor(t)]  # left by another test
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def reading(*args: Any, **options: Any) -> Any:
        held.append(bytes_of_tensors() - before)
        return read_model(*args, **options)

    monkeypatch.setattr(load, "read_model", reading)
    before = bytes_of_tensors()
    result = load_weights(target, folder)
    assert held == [0]
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert all(torch.equal(weight, target.state_dict()[name]) for name, weight in model.state_dict().items())
    assert torch.equal(target.scorer, torch.ones(3))
