"""Settings of policies and scorers are loaded without torch, and are the same for every way to request a policy."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from judging import in_one_line

from sparse_rl.config import yaml_fields
from sparse_rl.methods.config import CONFIGS, PolicyConfig, accepted_parameters
from sparse_rl.methods.kvpop.config import SCORER_CONFIGS, ScorerConfig
from sparse_rl.methods.kvpop.scorers import SCORERS
from sparse_rl.models.directory import save_policy, saved_policy
from sparse_rl.policies.make import make_policy

LIGHT = ("sparse_rl.methods.config", "sparse_rl.policies.schedule", "sparse_rl.methods.kvpop.config")
HEAVY = ("torch", "transformers", "trl", "vllm")


@pytest.mark.parametrize("module", [*LIGHT, "sparse_rl.policies.base"])
def test_modules_of_settings_import_no_torch(module: str) -> None:
    """Nor other HEAVY libraries. Control: the last module does, as the base class of policies names tensors."""
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {HEAVY}))"
    process = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert process.returncode == (module not in LIGHT), process.stderr


def test_a_cache_block_is_checked_without_torch() -> None:
    """The `cache` block of a recipe is read and checked, a misspelt key included, without importing HEAVY libraries."""
    code = (
        "import sys\n"
        "from sparse_rl.methods.config import PolicyConfig\n"
        "PolicyConfig.from_block({'policy': 'gkv', 'budget': 64})\n"
        "scorer = {'name': 'mlstm', 'skip': True}\n"
        "PolicyConfig.from_block({'policy': 'kvpop', 'budget': 600, 'scorer': scorer})\n"
        "try:\n"
        "    PolicyConfig.from_block({'policy': 'gkv', 'budget': 64, 'aplha': 1})\n"
        "except ValueError as error:\n"
        "    assert 'alpha' in str(error)\n"
        f"sys.exit(any(name in sys.modules for name in {HEAVY}))"
    )
    process = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_registries_use_the_names_of_the_settings() -> None:
    assert list(SCORER_CONFIGS) == list(SCORERS)
    assert all(config.name == name for name, config in [*CONFIGS.items(), *SCORER_CONFIGS.items()])


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_rebuilt_from_their_parameters_are_equal(name: str) -> None:
    size = {"budget": 600} if "budget" in accepted_parameters(name) else {}
    config = PolicyConfig.from_block({"policy": name, **size})
    assert PolicyConfig.from_block(config.as_block()) == config == make_policy(config).config
    assert list(config.parameters()) == [key for key in accepted_parameters(name) if key != "turns"]
    assert dataclasses.replace(config, turns="prefilled").parameters()["turns"] == "prefilled"
    for key in size:  # control: another budget gives other settings
        assert PolicyConfig.from_block({"policy": name, "budget": 601}) != config, key


def test_a_scorer_may_be_given_as_name_mapping_or_settings() -> None:
    """The three ways to request a scorer give equal settings; other parameters give other settings."""
    default_mlp = ScorerConfig.from_block("mlp")
    assert ScorerConfig.from_block({"name": "mlp"}) == ScorerConfig.from_block(default_mlp) == default_mlp
    assert default_mlp != ScorerConfig.from_block({"name": "mlp", "hidden": 3})
    assert default_mlp.as_block() == {"name": "mlp", "gamma": None, "hidden": None}
    changed = ScorerConfig.from_block({"name": "mlstm", "value": "full", "norm": True})
    assert changed != ScorerConfig.from_block("mlstm")
    assert ScorerConfig.from_block(changed.as_block()) == changed
    blocks = ({"policy": "kvpop", "budget": 600, "scorer": scorer} for scorer in ("mlp", default_mlp))
    by_name, by_settings = map(PolicyConfig.from_block, blocks)
    assert by_name == by_settings


MLSTM = {"features": "softmax", "value": "cached", "readout": "immediate", "norm": True, "softcap": None, "skip": True}
SCORER_OPTIONS = {
    "recency": {},
    "linear": {"gamma": 0.9999},
    "mlp": {"gamma": 0.9999, "hidden": 3},
    "mlstm": {"gamma": 0.9999, "chunk": 7, **MLSTM},
}


@pytest.mark.parametrize("name", SCORERS)
def test_a_model_directory_stores_all_scorer_options(name: str, tmp_path: Path) -> None:
    """Defaults are stored too, so that a later change of a default does not change a saved model."""
    options = SCORER_OPTIONS[name]
    config = SCORER_CONFIGS[name]
    assert set(options) == set(yaml_fields(config))
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    for given in ({}, options):
        policy = make_policy("kvpop", budget=600, scorer={"name": name, **given})
        save_policy(tmp_path, policy)
        written = json.loads((tmp_path / "cache_policy.json").read_text())
        assert written["scorer"] == {"name": name, **usual, **given}
        assert set(written) == {"format_version", "policy", *accepted_parameters("kvpop")} - {"turns"}  # kept
        loaded = saved_policy(tmp_path)
        assert loaded is not None
        assert loaded.config == policy.config


GROWING = {"tokens": [0, 8192, 32768], "entries": [512, 1024, 2048]}


def test_a_growing_budget_is_stored_with_a_model(tmp_path: Path) -> None:
    policy = make_policy("h2o", budget=GROWING)
    assert policy.config.window == 256
    save_policy(tmp_path, policy)
    loaded = saved_policy(tmp_path)
    assert loaded is not None
    assert loaded.config == policy.config
    assert loaded.schedule == policy.schedule
    assert json.loads((tmp_path / "cache_policy.json").read_text())["budget"] == GROWING


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gkv", {"entries": [512, 1024]}, "gkv: budget.entries: 3 tokens and 2 entries are not as many knots; "),
        ("gkv", {"tokens": [], "entries": []}, "gkv: budget.entries: 0 tokens and 0 entries are not as many knots; "),
        ("gkv", {"tokens": [0, 9000, 9000]}, "gkv: budget.tokens: 9000 after 9000 does not ascend; "),
        ("gkv", {"entries": [512, 511, 2048]}, "gkv: budget.entries: 511 after 512 falls; "),
        ("gkv", {"tokens": [0, 511, 9000]}, "gkv: budget.entries: from 512 to 1024 in 511 tokens is more than one "),
        ("gkv", {"entries": [16, 1024, 2048]}, "gkv: budget: 16 must exceed window 16 "),
        ("gkv", {"knots": 3}, "gkv: budget.knots: unknown key; "),
        ("am", {"entries": [16, 1024, 2048]}, "am: budget: 16 must exceed window 16 "),
        ("kvpop", {}, "kvpop: budget: expected a whole number >= 1, got "),
        ("lined", {}, "cache policy 'lined' has no parameter 'budget'; "),
    ],
)
def test_malformed_knots_are_refused_in_one_line(name: str, changed: dict, message: str) -> None:
    line = in_one_line(lambda: make_policy(name, budget={**GROWING, **changed}))
    assert str(line).startswith(message)
