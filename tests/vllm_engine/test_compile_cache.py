"""In vLLM's compile cache, all policies and budgets share one compilation; other forward passes have their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tiny import directory_of, policy_of

from rollout.vllm.compat import arguments, plugin
from rollout.vllm.serve import command_line

EVICTING = [
    ("gkv", {"budget": 64, "window": 8, "period": 16}),
    ("gkv", {"budget": 128, "window": 8, "period": 16}),
    ("streaming", {"budget": 64}),
    ("h2o", {"budget": 64}),
    ("kvpop", {"budget": 64, "window": 16}),
]


@pytest.fixture
def config_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """config_of(policy name, parameters, on_gpu=, as_words=, **options) -> the VllmConfig of such an engine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plugin.register()  # sets the platform of this machine, which vLLM would otherwise do below

    def make(name: str, parameters: dict, *, on_gpu: bool = True, as_words: bool = False, **options: Any) -> Any:
        monkeypatch.setattr(arguments, "on_cpu", lambda: not on_gpu)
        policy_arguments = arguments.engine_arguments(policy_of(name, **parameters), **{"dtype": "float32", **options})
        engine_arguments = {"model": str(directory_of("qwen2")), "dtype": "float32", "skip_tokenizer_init": True}
        engine_arguments |= policy_arguments
        if not as_words:
            return EngineArgs(**engine_arguments).create_engine_config()
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        return EngineArgs.from_cli_args(parser.parse_args(command_line(**engine_arguments))).create_engine_config()

    return make


@pytest.mark.parametrize("as_words", [False, True], ids=["engine", "serve"])
def test_policies_and_budgets_share_one_compilation(as_words: bool, config_of: Callable) -> None:
    """On a GPU, in an engine and in a server. The configuration of each worker still has its own policy."""
    configs = [config_of(name, parameters, as_words=as_words) for name, parameters in EVICTING]
    configs.append(config_of(*EVICTING[0], as_words=as_words, max_prompt=700))
    cache_configs = [arguments.cache_config(config) for config in configs]
    assert [settings.policy.config.name for settings in cache_configs] == [name for name, _ in EVICTING] + ["gkv"]
    assert [settings.policy.config.budget for settings in cache_configs] == [64, 128, 64, 64, 64, 64]
    assert [settings.max_prompt for settings in cache_configs] == [None] * len(EVICTING) + [700]
    assert len({config.compute_hash() for config in configs}) == 1


def test_each_kind_of_forward_pass_has_its_own_compilation(config_of: Callable) -> None:
    """Evicting, full, heads with room for biases, vLLM's kernels on a CPU, and the trainer's float32 on a CPU."""
    default = config_of(*EVICTING[0])
    others = {
        "a full cache": config_of("full", {}),
        "biases in the heads": config_of("full", {}, contexts=[]),
        "vLLM's kernels on a CPU": config_of(*EVICTING[0], on_gpu=False, exact=False),
        "the trainer's float32 on a CPU": config_of(*EVICTING[0], on_gpu=False),
    }
    hashes = {label: config.compute_hash() for label, config in {"plain": default, **others}.items()}
    assert len(set(hashes.values())) == len(hashes), hashes
    for config in (default, *others.values()):
        stored = arguments.cache_config(config)
        assert config.additional_config[arguments.KEY] == {"exact": stored.exact, "folds": stored.folds}


def test_vllms_hash_includes_our_settings(config_of: Callable) -> None:
    """Control: vLLM's hash includes additional_config, but not the connector's own configuration."""
    config = config_of(*EVICTING[0])
    before = config.compute_hash()
    extra = config.kv_transfer_config.kv_connector_extra_config[arguments.KEY]
    extra["policy"] = json.dumps({"policy": "streaming"})
    assert config.compute_hash() == before
    config.additional_config[arguments.KEY]["folds"] = True
    assert config.compute_hash() != before
