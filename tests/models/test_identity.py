"""A fingerprint identifies weights: it is equal for a directory and for modules with its weights, and differs for other
weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import UserError
from sparse_rl.models.directory import WEIGHTS
from sparse_rl.models.load import load_model
from sparse_rl.models.weights import UNKNOWN, Identity, identify

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart/model"
STORIES = Path(__file__).parents[3] / "shared/models/stories260K"


def fingerprint(model: object) -> str:
    return identify(model).fingerprint


@pytest.mark.parametrize("folder", [QUICKSTART, STORIES], ids=["quickstart", "stories260K"])
def test_a_directory_and_its_modules_have_one_fingerprint(folder: Path, tmp_path: Path) -> None:
    """In float32 and bfloat16, and in shards. Control: other weights."""
    if not (folder / "config.json").is_file():
        pytest.skip("the trained model stories260K is not here")
    expected = fingerprint(folder)
    assert len(expected) == 16
    for dtype in ("float32", "bfloat16"):
        model = load_model(folder, dtype)
        assert fingerprint(model) == expected
        model.save_pretrained(tmp_path / dtype)
        assert fingerprint(tmp_path / dtype) == expected
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert fingerprint(tmp_path / "shards") == expected
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    assert fingerprint(model) != expected


def test_the_output_layer_and_the_decoders_prefix_do_not_count(tmp_path: Path) -> None:
    """A checkpoint may hold a tied output layer or not, and its names may lack the prefix `model.`."""
    shutil.copytree(QUICKSTART, tmp_path / "model")
    weights = load_file(tmp_path / "model" / WEIGHTS)
    expected = fingerprint(QUICKSTART)
    with_output = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(with_output, tmp_path / "model" / WEIGHTS)
    assert fingerprint(tmp_path / "model") == expected
    save_file({name.removeprefix("model."): value for name, value in weights.items()}, tmp_path / "model" / WEIGHTS)
    assert fingerprint(tmp_path / "model") == expected


def test_a_training_step_and_a_seed_change_the_fingerprint(tmp_path: Path) -> None:
    """Control: a step with learning rate 0 does not change it."""
    for seed in (0, 1):
        RunningSum.save_untrained(tmp_path / str(seed), seed)
    assert fingerprint(tmp_path / "0") != fingerprint(tmp_path / "1")
    model = load_model(tmp_path / "0")
    for rate in (0.0, 1e-3):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        ids = torch.arange(5, 13)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert (fingerprint(model) == fingerprint(tmp_path / "0")) == (rate == 0)


def test_weights_that_cannot_be_compared_have_no_fingerprint(tmp_path: Path) -> None:
    assert identify("nobody/no-such-model") == Identity("nobody/no-such-model")
    assert fingerprint(load_model(QUICKSTART, "float16")) == ""
    (tmp_path / "empty").mkdir()
    assert fingerprint(tmp_path / "empty") == ""
    (tmp_path / "empty" / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(UserError, match="cannot be read") as caught:
        identify(tmp_path / "empty")
    assert "\n" not in str(caught.value)


def test_only_two_fingerprints_are_compared() -> None:
    one, other = Identity("a", "1"), Identity("b", "2")
    one.check(Identity("c", "1"), "it")
    one.check(UNKNOWN, "it")
    UNKNOWN.check(one, "it")
    with pytest.raises(UserError, match=r"it is of another model: it was made with a \(1\), and is used with b \(2\)"):
        one.check(other, "it")
