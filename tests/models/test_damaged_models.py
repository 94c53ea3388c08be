"""A damaged model directory is either refused in one line, before any of it is used, or still usable.

Random damage: any file is truncated, overwritten, emptied or removed, or any value of its JSON is replaced.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import in_one_line
from safetensors.torch import load_file, save_file

from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import UserError
from sparse_rl.models.directory import POLICY_FILE, SCORER_FILE, save_policy, saved_policy, stored_scorers
from sparse_rl.models.load import (
    load_config,
    load_generation_config,
    load_model,
    load_plain_model,
    load_tokenizer,
    writable,
)
from sparse_rl.models.weights import CONVERT, INDEX, WEIGHTS, check_weights
from sparse_rl.policies import make_policy

TEXT = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", POLICY_FILE)


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "whole"
    RunningSum.save_untrained(folder, 0)
    save_policy(folder, make_policy("streaming", budget=16))
    assert {*TEXT, WEIGHTS} <= {file.name for file in folder.iterdir()}
    return folder


@pytest.fixture
def damaged(undamaged: Path, tmp_path: Path) -> Path:
    """A copy of the model directory to damage."""
    return Path(shutil.copytree(undamaged, tmp_path / "model"))


def refusal(folder: Path) -> str | None:
    """Return the one-line error of a model directory. None means that it is loaded and used without error."""
    path = str(folder)

    def load() -> tuple[Any, Any]:
        check_weights(load_config(path), path)
        tokenizer = load_tokenizer(path)
        saved_policy(path)
        return tokenizer, load_model(path)

    result = in_one_line(load)
    if isinstance(result, str):
        return result
    tokenizer, model = result
    assert tokenizer("Qa1?")["input_ids"]
    assert all(weight.numel() for weight in model.parameters())
    return None


# ---- random damage -------------------------------------------------------------------------------------------------

VALUES = (None, True, -1, 0, 1, 3, 2**31, 2**70, 1e308, -0.5, "", "nonsense", "\ud800", [], ["a"], {}, {"a": [1]})


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the path of every value in JSON; of a long list, only the paths in its first elements."""
    results = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in list(inner)[:40]:
        results += places(item, (*path, key))
    return results


@st.composite
def damages(draw: Any) -> Callable[[Path], None]:
    """Draw a function that damages a model directory in one way."""
    name = draw(st.sampled_from((*TEXT, "config.json", WEIGHTS, WEIGHTS)))
    kind = draw(st.sampled_from(("cut", "bytes", "whole", "gone", "folder", "value", "value", "value", "less")))
    share, junk = draw(st.floats(0, 1)), draw(st.binary(min_size=1, max_size=12))
    texts = (b"", b"{}", b"[]", b"null", b"5", b'{"a": 1}', b"[" * 20_000, b"\xff\xfe", b"{" * 9)
    content = draw(st.sampled_from(texts))
    value, pick = draw(st.sampled_from(VALUES)), draw(st.integers(0, 10**6))

    def damage(folder: Path) -> None:
        file = folder / name
        data = file.read_bytes()
        at = int(share * len(data))
        if kind == "gone":
            file.unlink()
        elif kind == "folder":
            file.unlink()
            file.mkdir()
        elif kind in ("value", "less") and name in TEXT:
            document = json.loads(data)
            *path, last = (computed := places(document))[pick % len(computed)]
            block = document
            for key in path:
                block = block[key]
            if kind == "less" and isinstance(block, dict):
                del block[last]
            else:
                block[last] = value
            file.write_text(json.dumps(document))
        elif kind == "whole":
            file.write_bytes(content)
        else:
            file.write_bytes(data[:at] + (junk + data[at + len(junk) :] if kind == "bytes" else b""))

    return damage


@pytest.mark.filterwarnings("ignore")  # one that quotes a damaged text may have no UTF-8 form, which xdist needs
@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_damaged_model_is_usable_or_refused_in_one_line(examples: int, undamaged: Path, tmp_path: Path) -> None:
    @settings(max_examples=examples, derandomize=True, deadline=None)
    @given(damages())
    def check(damage: Callable[[Path], None]) -> None:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        damage(Path(shutil.copytree(undamaged, tmp_path / "model")))
        refusal(tmp_path / "model")

    check()


# ---- damage that the random tests found ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["vocab", "added"])
def test_token_ids_far_beyond_the_vocabulary_are_refused(place: str, damaged: Path) -> None:
    """For 2^31 the tokenizers library would make a list of many gigabytes."""
    file = damaged / "tokenizer.json"
    content = json.loads(file.read_text())
    if place == "vocab":
        content["model"]["vocab"]["7"] = 2**31
    else:
        content["added_tokens"][0]["id"] = 2**31
    file.write_text(json.dumps(content))
    assert "2147483648 is not a valid token id" in str(refusal(damaged))


def test_control_an_undamaged_model_is_accepted_as_one_file_or_in_shards(damaged: Path) -> None:
    """Damage is refused here too: a missing shard, or an index that names files of another folder."""
    assert refusal(damaged) is None
    weights = load_file(damaged / WEIGHTS)
    half = len(weights) // 2
    shards = {"a.safetensors": list(weights)[:half], "b.safetensors": list(weights)[half:]}
    for name, ours in shards.items():
        save_file({weight: weights[weight] for weight in ours}, damaged / name, {"format": "pt"})
    (damaged / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": {weight: name for name, ours in shards.items() for weight in ours}}
    (damaged / INDEX).write_text(json.dumps(index))
    assert refusal(damaged) is None
    (damaged / "b.safetensors").unlink()
    assert "b.safetensors cannot be read" in str(refusal(damaged))
    index["weight_map"] = dict.fromkeys(weights, "../whole/model.safetensors")
    (damaged / INDEX).write_text(json.dumps(index))
    assert "does not name files beside it" in str(refusal(damaged))


@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.5, 0.99999])
def test_a_truncated_file_of_weights_is_refused(damaged: Path, share: float) -> None:
    data = (damaged / WEIGHTS).read_bytes()
    (damaged / WEIGHTS).write_bytes(data[: int(share * len(data))])
    assert f"{damaged / WEIGHTS} cannot be read" in str(refusal(damaged))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_key_value_heads", -1, "num_key_value_heads is -1 in config.json"),
        ("num_key_value_heads", 3, "3 kv heads do not divide 4 heads"),
        ("num_key_value_heads", 4, "has shape [64, 64], but [128, 64] by its config.json"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000"),
        ("num_hidden_layers", 3, "lack model.layers.2."),
        ("vocab_size", "64", "vocab_size is '64'"),
        ("hidden_act", "nonsense", "describes no model"),
        ("eos_token_id", "nonsense", "eos_token_id"),
        ("eos_token_id", [1, "x"], "eos_token_id"),
    ],
)
def test_wrong_values_in_the_configuration_are_refused(damaged: Path, name: str, value: Any, message: str) -> None:
    config = json.loads((damaged / "config.json").read_text())
    config.pop("layer_types", None)
    (damaged / "config.json").write_text(json.dumps({**config, name: value}))
    assert message in str(refusal(damaged))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"eos_token_id": "x"}', "\0", '{"num_return_sequences": 4}', '{"dtype": 5}']
)
def test_invalid_stop_token_settings_are_refused(damaged: Path, text: str) -> None:
    """transformers ignores a file that it cannot read; the model would lack its stop tokens."""
    (damaged / "generation_config.json").write_text(text)
    assert refusal(damaged)
    (damaged / "generation_config.json").unlink()
    assert refusal(damaged) is None  # control: the file is optional


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("values", "saved"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6, "do_sample": True}),
        ({"min_p": 0.1, "do_sample": False}, {"min_p": 0.1, "do_sample": True}),
        ({"num_beams": 1, "early_stopping": True, "length_penalty": 2.0}, {"num_beams": 1}),
        ({"num_beams": 4, "early_stopping": True, "top_k": 5}, {"num_beams": 4, "early_stopping": True, "top_k": 5}),
        ({"pad_token_id": -1, "epsilon_cutoff": 0.1}, {"epsilon_cutoff": 0.1, "do_sample": True}),
        ({"use_cache": False, "cache_implementation": "static"}, {"use_cache": False}),
        ({"do_sample": True, "top_k": 20, "repetition_penalty": 1.1}, None),  # control: it can be saved as it is
        ({"do_sample": False, "top_k": 50}, None),
    ],
)
def test_a_generation_config_that_transformers_loads_can_be_saved(
    file: str, values: dict[str, Any], saved: dict[str, Any] | None, damaged: Path, tmp_path: Path
) -> None:
    """transformers loads values that it refuses to save; `writable` keeps what can be saved, or config.json's."""
    content = json.loads((damaged / file).read_text())
    if file == "config.json":
        (damaged / "generation_config.json").unlink()
    (damaged / file).write_text(json.dumps({**content, "eos_token_id": [3, 1], **values}))
    generation = load_generation_config(damaged)
    with nullcontext() if saved is None else pytest.raises(ValueError, match="GenerationConfig is invalid"):
        generation.save_pretrained(tmp_path)
    writable(generation).save_pretrained(tmp_path)
    after = load_generation_config(tmp_path)
    assert after.eos_token_id == [3, 1]
    assert {name: getattr(after, name) for name in saved or values} == (saved or values)
    assert all(getattr(after, name) is None for name in values.keys() - (saved or values).keys())


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_and_the_printed_command_converts_it(damaged: Path, tmp_path: Path, name: str) -> None:
    """Unpickling would run code from the file."""
    weights = load_file(damaged / WEIGHTS)
    (damaged / WEIGHTS).unlink()
    (damaged / name).write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    for load in (refusal, lambda folder: load_plain_model(folder)):
        try:
            line = load(damaged)
        except UserError as error:
            line = str(error)
        assert f"{damaged / name} is a pickle" in line
        assert CONVERT.format(str(damaged)) in line
    assert not (tmp_path / "touched").exists()
    if name == "pytorch_model.bin":
        torch.save(weights, damaged / name)
        exec(CONVERT.format(str(damaged)))
        assert refusal(damaged) is None
        converted = load_file(damaged / WEIGHTS)
        assert converted.keys() == weights.keys()
        assert all(torch.equal(converted[weight], weights[weight]) for weight in weights)
    pickle.loads(pickle.dumps(Touch(tmp_path / "touched")))
    assert (tmp_path / "touched").exists()  # control: unpickling would have run the code


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "int"])
def test_scorers_that_are_not_finite_are_refused(value: Any, tmp_path: Path) -> None:
    """Control: finite scorers are read."""
    weights = {"0.bias": torch.zeros(3), "0.weight": torch.ones(2, 2)}
    save_file(weights, tmp_path / SCORER_FILE)
    assert stored_scorers(tmp_path).keys() == weights.keys()
    weights["0.weight"] = weights["0.weight"].int() if value == "int" else weights["0.weight"] * value
    save_file(weights, tmp_path / SCORER_FILE)
    with pytest.raises(UserError, match=r"cannot be used: 0\.weight has values that are not finite numbers"):
        stored_scorers(tmp_path)
