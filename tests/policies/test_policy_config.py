"""The settings of policies and scorers: read without torch, and the same however a policy is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy
from sparse_rl.policies.config import CONFIGS, EvictingConfig, accepted_parameters, cache_config
from sparse_rl.policies.registry import POLICIES, make_policy, sampled_under
from sparse_rl.policies.schedule import Schedule
from sparse_rl.scorers.config import CONFIGS as SCORER_CONFIGS
from sparse_rl.scorers.config import scorer_config
from sparse_rl.scorers.registry import SCORERS

LIGHT = ("sparse_rl.policies.config", "sparse_rl.policies.schedule", "sparse_rl.scorers.config")
HEAVY = ("torch", "transformers", "trl", "vllm")


@pytest.mark.parametrize("module", [*LIGHT, "sparse_rl.policies.base"])
def test_settings_are_read_without_torch(module: str) -> None:
    """In a process of its own. The last is the control: the contract speaks of tensors."""
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {HEAVY}))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == (module not in LIGHT), done.stderr


def test_a_cache_block_is_checked_without_torch() -> None:
    code = (
        "import sys\n"
        "from sparse_rl.recipe.kinds.caches import check_cache\n"
        "check_cache({'policy': 'gkv', 'budget': 64})\n"
        "check_cache({'policy': 'kvpop', 'budget': 600, 'scorer': {'name': 'mlstm', 'skip': True}}, learned=True)\n"
        "try:\n"
        "    check_cache({'policy': 'gkv', 'budget': 64, 'aplha': 1})\n"
        "except ValueError as error:\n"
        "    assert 'alpha' in str(error)\n"
        f"sys.exit(any(name in sys.modules for name in {HEAVY}))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_registries_name_the_same() -> None:
    assert list(CONFIGS) == list(POLICIES) and list(SCORER_CONFIGS) == list(SCORERS)
    assert all(config.name == name for name, config in [*CONFIGS.items(), *SCORER_CONFIGS.items()])


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_are_those_that_their_parameters_make(name: str) -> None:
    size = {"budget": 600} if "budget" in accepted_parameters(name) else {}
    config = cache_config({"policy": name, **size})
    assert cache_config({"policy": name, **config.parameters()}) == config == make_policy(config).config
    assert list(config.parameters()) == accepted_parameters(name)
    for key in size:
        assert cache_config({"policy": name, "budget": 601}) != config, key


def test_a_scorer_is_a_name_a_mapping_or_settings() -> None:
    plain = scorer_config("mlp")
    assert scorer_config({"name": "mlp"}) == scorer_config(plain) == plain
    assert plain != scorer_config({"name": "mlp", "hidden": 3})
    assert plain.parameters() == {"name": "mlp"}
    changed = scorer_config({"name": "mlstm", "value": "full", "norm": False})
    assert changed.parameters() == {"name": "mlstm", "value": "full", "norm": False}
    by_name, by_settings = (cache_config({"policy": "kvpop", "budget": 600, "scorer": s}) for s in ("mlp", plain))
    assert by_name == by_settings


class ByPosition(EvictingConfig):
    name = "test"


class Remembers(Policy):
    def sequence_memory(self, kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (kv_heads, head_dim)}


def test_what_no_engine_samples_is_said_in_one_line() -> None:
    config = ByPosition(budget=8)
    assert config.schedule == Schedule(8) and sampled_under(Policy(config)).name == "test"
    with pytest.raises(UserError, match=r"^no engine samples under test yet: it needs memory per sequence; [^\n]*$"):
        sampled_under(Remembers(config))
    with pytest.raises(UserError, match=r"^no engine samples under kvpop yet: it decides before a query[^\n]*$"):
        sampled_under(make_policy("kvpop", budget=600))
