"""The choice of the sampling engine: the meaning of `auto`, refusals, and the engine's arguments from a recipe."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from planned import plan

from rollout import ENGINES, RolloutConfig, default_engine, make_engine
from rollout.config import ALONE
from rollout.engine import CPU_HEAD_SIZES, choose_engine
from rollout.vllm.compat.arguments import refuse_engine
from rollout.vllm.engine import VLLMEngine
from sparse_rl.attention.families import FAMILIES
from sparse_rl.commands.main import make_parser
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import UserError
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.policies import make_policy
from sparse_rl.recipe import EvalRecipe, GRPORecipe, make_recipe
from trainer.launch import needs_launch

SYNTHETIC = {"synthetic": {"task": "running_sum", "size": 64}}


def grpo(**keys: Any) -> GRPORecipe:
    """Return a small GRPO recipe with these keys."""
    mapping = {
        "kind": "grpo", "model": "m", "output_dir": "o", "data": SYNTHETIC, "rewards": ["boxed"],
        "cache": {"policy": "streaming", "budget": 32, "period": 8}, "max_completion_length": 100,
    }  # fmt: skip
    recipe = make_recipe({**mapping, **keys})
    return recipe


def evaluation(**keys: Any) -> EvalRecipe:
    """Return a small evaluation recipe with these keys."""
    recipe = make_recipe({"kind": "eval", "model": "m", "output_dir": "o", "tasks": {"t": SYNTHETIC}, **keys})
    return recipe


def config(head_dim: int = 32) -> SimpleNamespace:
    """Return the configuration of a small Llama model."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    return SimpleNamespace(model_type="llama", max_position_embeddings=2**17, **shape)


@pytest.fixture
def machine(monkeypatch):
    """machine(None | "cpu" | "cuda", gpu) simulates a machine with this build of vllm, or none, and with or without a
    GPU."""

    def make(vllm: str | None, gpu: bool = False) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
        find = importlib.util.find_spec
        spec = None if vllm is None else object()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: spec if name == "vllm" else find(name, *a))
        monkeypatch.setattr("rollout.engine._is_cpu_build", lambda: vllm == "cpu")

    return make


@pytest.mark.parametrize(
    ("installed", "cuda", "head_size", "refusal"),
    [
        ("cpu", False, 32, None),
        ("cpu", False, 128, None),
        ("cpu", False, 16, "head size 16 is not supported by vllm on this platform"),
        ("cpu", True, 24, "head size 24 is not supported by vllm on this platform"),
        ("cuda", True, 16, None),
        ("cuda", False, 32, "there is no GPU, but the installed vLLM needs one"),
        (None, False, 32, 'vllm is not installed: pip install "vllm==0.32.*"'),
        (None, True, 128, 'vllm is not installed: pip install "vllm==0.32.*"'),
    ],
)
def test_auto_takes_vllm_if_vllm_can_run_and_else_hf(installed, cuda, head_size, refusal, machine):
    machine(installed, cuda)
    expected = ("vllm", "vllm engine") if refusal is None else ("hf", f"hf engine ({refusal})")
    assert choose_engine(RolloutConfig(), config(head_size), ()) == expected
    assert choose_engine(RolloutConfig(engine="hf"), config(head_size), ()) == ("hf", "hf engine")
    if refusal is None:
        assert choose_engine(RolloutConfig(engine="vllm"), config(head_size), ()) == expected
    else:
        with pytest.raises(UserError) as caught:
            choose_engine(RolloutConfig(engine="vllm"), config(head_size), ())
        assert str(caught.value) == f"rollout.engine: {refusal}; use the engine hf"


@pytest.mark.parametrize("installed", [None, "cpu", "cuda"])
def test_for_another_machine_with_a_gpu_vllm_is_assumed_whatever_is_installed_here(installed, machine):
    """Control: what vLLM cannot do at all still takes hf."""
    machine(installed)
    assert choose_engine(RolloutConfig(), config(24), (), True) == ("vllm", "vllm engine")
    layered = PolicyConfig.from_block({"policy": "layered"})
    assert choose_engine(RolloutConfig(), config(24), [layered], True)[0] == "hf"


@pytest.mark.parametrize(("installed", "name"), [(None, "hf"), ("cpu", "vllm"), ("cuda", "vllm")])
def test_the_default_engine_is_vllm_if_installed_and_else_hf(installed, name, machine):
    machine(installed)
    assert default_engine() == name in ENGINES


def test_policies_that_only_hf_supports_use_hf(machine):
    """Control: with dense prefill alone, `auto` takes vllm."""
    machine("cpu")
    masked, plain = (
        PolicyConfig.from_block({"policy": "kvpop", "budget": 600, "prefill": prefill})
        for prefill in ("masked", "dense")
    )
    reason = "kvpop: vllm does not mask prompts (prefill: masked)"
    assert choose_engine(RolloutConfig(), config(32), [plain], False) == ("vllm", "vllm engine")
    assert choose_engine(RolloutConfig(), config(32), [plain, masked], False) == ("hf", f"hf engine ({reason})")
    with pytest.raises(UserError) as caught:
        choose_engine(RolloutConfig(engine="vllm"), config(32), [plain, masked], False)
    assert str(caught.value) == f"rollout.engine: {reason}; use the engine hf"


def test_servers_are_asked_if_there_are_any(machine):
    """No vLLM is needed here. Controls: without servers, and with another engine."""
    machine(None)
    servers = ["http://one:8000", "https://two:8000/"]
    here = RolloutConfig(servers=servers)
    assert choose_engine(here, config(24), ()) == ("server", "servers at http://one:8000, https://two:8000/")
    assert choose_engine(RolloutConfig(), config(24), ())[0] == "hf"
    with pytest.raises(UserError, match="gives all layers"):
        choose_engine(here, config(24), [PolicyConfig.from_block({"policy": "layered"})])
    with pytest.raises(UserError, match="are not asked by the engine hf"):
        RolloutConfig(engine="hf", servers=servers)
    with pytest.raises(UserError, match="such as http://host:8000"):
        RolloutConfig(servers=["one:8000"])
    asked = grpo(rollout={"servers": servers}).resolve(config(24)).recipe
    assert asked.engine_arguments()["servers"] == servers
    with pytest.raises(UserError, match=r"rollout\.servers: needs at least one URL"):
        grpo(rollout={"engine": "server"}).resolve(config(24))


def test_a_launch_starts_servers_as_its_recipe_says():
    recipe = grpo(launch={"rollout_gpus": 2}, rollout={"max_batch": 8}, dtype="float32")
    assert recipe.rollout.engine == "server"
    words = recipe.serving_words()
    assert words[:5] == ["-m", "sparse_rl.cli", "serve", "m", "--rollouts"]
    options = make_parser().parse_args(words[2:])
    assert (options.dtype, options.max_batch, options.cache[0]) == ("float32", 8, 'policy="streaming"')
    assert needs_launch(recipe.launch)
    for wrong, why in [
        ({"rollout": {"engine": "vllm"}}, "names another engine"),
        ({"rollout": {"servers": ["http://one:8000"]}}, "other servers"),
        ({"rollout": {"exact": False}}, "compute exactly"),
    ]:
        with pytest.raises(UserError, match=why):
            grpo(launch={"rollout_gpus": 2}, **wrong)


def test_a_refusal_is_not_preceded_by_a_warning(machine):
    machine("cpu")
    on_vllm, on_hf = (evaluation(cache={"policy": "layered"}, rollout={"engine": engine}) for engine in ("vllm", "hf"))
    with pytest.raises(UserError, match=r"rollout\.engine: layered: vllm gives all layers"):
        on_vllm.resolve(config(32))
    (remark,) = on_hf.resolve(config(32)).remarks  # control
    assert remark.startswith("layered: the 2 layers under the policy")


def test_families_that_only_hf_supports_use_hf(machine, monkeypatch):
    machine("cpu")
    assert choose_engine(RolloutConfig(), config(32), (), False) == ("vllm", "vllm engine")
    monkeypatch.setitem(FAMILIES, "llama", "vllm has no code for it")
    reason = "llama: vllm has no code for it"
    assert choose_engine(RolloutConfig(), config(32), (), False) == ("hf", f"hf engine ({reason})")
    with pytest.raises(UserError) as caught:
        choose_engine(RolloutConfig(engine="vllm"), config(32), (), False)
    assert str(caught.value) == f"rollout.engine: {reason}; use the engine hf"
    with pytest.raises(UserError, match=f"^model: {reason}; use"):
        refuse_engine(make_policy("full"), config(32), otherwise="; use the engine hf")


def test_a_model_in_memory_is_sampled_with_hf(machine):
    """A live module has no configuration file (None). vllm cannot sample from it, since vllm has its own weights."""
    machine("cpu")
    assert choose_engine(RolloutConfig(), None, ())[0] == "hf"
    with pytest.raises(UserError, match=r"rollout\.engine: vllm keeps its own copy of the weights"):
        choose_engine(RolloutConfig(engine="vllm"), None, ())


def test_a_resolved_recipe_keeps_its_engine(machine):
    machine("cpu")
    chosen = grpo().resolve(config(16))
    assert chosen.findings["rollouts"] == "hf engine (head size 16 is not supported by vllm on this platform)"
    machine(None)  # now vllm is not installed
    resolved_again = chosen.recipe.resolve(config(32))
    assert resolved_again.recipe == chosen.recipe
    assert resolved_again.findings["rollouts"] == "hf engine"
    assert chosen.recipe.rollout.engine == "hf"


@pytest.mark.parametrize(("queries", "warned"), [(9, True), (10, False)])
def test_too_few_reference_queries_give_a_warning(queries, warned, machine):
    """A fit of 20 entries needs 20 equations; each reference query gives one for each of two query heads."""
    machine(None)
    cache = {"policy": "am", "budget": 24, "window": 4, "period": 8, "reference_queries": queries}
    warnings = grpo(cache=cache).resolve(config()).remarks
    assert len(warnings) == warned
    assert all(
        "am: 9 reference queries of 2 heads are 18 conditions for the 20 entries" in remark for remark in warnings
    )


def test_make_engine_refuses_unusable_arguments_with_the_reason(machine, tmp_path):
    machine(None)
    with pytest.raises(ValueError, match=r'not installed: pip install "vllm==0\.32\.\*", or use the engine hf'):
        make_engine("vllm", model=tmp_path)
    with pytest.raises(ValueError, match="keeps its own weights: pass the directory of a model"):
        make_engine("vllm", model=RunningSum.untrained(0))
    with pytest.raises(ValueError, match="unknown engine 'sglang'; known: hf, vllm"):
        make_engine("sglang", model=tmp_path)
    with pytest.raises(ValueError, match="engine 'hf' has no option 'kv_cache_gb'"):
        make_engine("hf", model=tmp_path, kv_cache_gb=1.0)


def test_valid_engine_settings_are_accepted():
    """Controls of the refusals above. `max_model_len` must hold the longest prompt (here 50) and completion (100)."""
    keys = {"kv_cache_gb": 2, "gpu_memory_utilization": 1.0, "max_model_len": 101, "sleep": True, "engine": "vllm"}
    assert grpo(rollout=keys).rollout.kv_cache_gb == 2.0
    bounded = {"data": {**SYNTHETIC, "max_prompt_tokens": 50}}
    with pytest.raises(UserError, match="at least 150 tokens"):
        grpo(rollout=keys, **bounded)
    assert evaluation(rollout={"tensor_parallel": 4}).rollout.tensor_parallel == 4


def test_an_evaluation_takes_a_larger_share_of_the_gpu(machine):
    """In training the default is 30 %, since the update needs the rest."""
    machine("cuda")
    assert ALONE == 0.9
    assert evaluation(rollout={"engine": "vllm"}).engine_arguments()["gpu_memory_utilization"] == ALONE
    assert grpo(rollout={"engine": "vllm"}).engine_arguments()["gpu_memory_utilization"] == 0.3
    lower = evaluation(rollout={"engine": "vllm", "gpu_memory_utilization": 0.5})
    assert lower.engine_arguments()["gpu_memory_utilization"] == 0.5


def test_tensor_parallel_is_refused_without_vllm(machine):
    machine("cuda", gpu=True)
    rollout = RolloutConfig(tensor_parallel=4)
    assert choose_engine(rollout, config(), ())[0] == "vllm"
    for engine, installed in (("hf", "cuda"), ("auto", None)):
        machine(installed, gpu=True)
        with pytest.raises(UserError, match=r"rollout\.tensor_parallel: only the vllm engine"):
            choose_engine(RolloutConfig(engine=engine, tensor_parallel=4), config(), ())  # type: ignore[arg-type]


def test_a_dry_run_prints_the_chosen_engine(machine, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine("cpu")
    RunningSum.save_untrained(tmp_path / "32", 0)
    RunningSum.save_untrained(tmp_path / "16", 0, head_dim=16)

    def printed(head_dim: int, **rollout: Any) -> str:
        recipe = grpo(model=str(tmp_path / str(head_dim)), output_dir=str(tmp_path / "out"), rollout=rollout)
        return recipe.prepare_training(here=False).findings["rollouts"]

    # vllm for a CPU supports heads of 32 numbers, but not of 16
    assert printed(32) == printed(32, engine="vllm") == "vllm engine"
    assert printed(16) == "hf engine (head size 16 is not supported by vllm on this platform)"
    assert printed(16, engine="hf") == "hf engine"
    with pytest.raises(UserError, match=r"rollout\.engine: head size 16 .*; use the engine hf"):
        printed(16, engine="vllm")


def test_an_engine_gets_only_the_options_that_it_accepts():
    rollout = {"max_batch": 7, "kv_cache_gb": 2.0, "gpu_memory_utilization": 0.5, "engine": "vllm"}
    given = grpo(rollout=rollout, dtype="float32").engine_arguments()
    assert given.keys() < inspect.signature(VLLMEngine.__init__).parameters.keys()
    assert given == {
        "dtype": "float32", "max_batch": 7, "max_prompt": None, "max_model_len": None, "kv_cache_gb": 2.0,
        "gpu_memory_utilization": 0.5, "tensor_parallel": 1, "sleep_mode": False, "full_graphs": False, "exact": True,
    }  # fmt: skip
    on_hf = grpo(rollout={**rollout, "engine": "hf"}, dtype="bfloat16").engine_arguments()
    assert on_hf == {"dtype": "bfloat16", "max_batch": 7}


@pytest.mark.parametrize(
    ("data", "held_out", "max_model_len", "prompt", "length"),
    [
        (200, None, None, 200, 300),
        (200, 250, None, 250, 350),
        (200, 250, 400, 250, 400),
        (5, None, None, 5, 105),
        (None, None, 300, None, 300),
        (200, "unknown", None, 200, 300),
        (None, 200, None, None, None),
        (None, "unknown", None, None, None),
    ],
)
def test_the_longest_sequence_follows_from_the_bounds_on_prompts(data, held_out, max_model_len, prompt, length):
    keys: dict[str, Any] = {"data": {**SYNTHETIC, **({"max_prompt_tokens": data} if data else {})}}
    if held_out is not None:
        bound = {} if held_out == "unknown" else {"max_prompt_tokens": held_out}
        keys["validation"] = {"data": {**SYNTHETIC, **bound}}
    given = grpo(rollout={"engine": "vllm", "max_model_len": max_model_len}, **keys).engine_arguments()
    assert (given["max_prompt"], given["max_model_len"]) == (prompt, length)


def test_validation_inherits_the_bound_of_the_data():
    """Of every kind with validation, before and after a round trip, and in the evaluation of its held-out problems."""
    kinds = {"grpo": {"rewards": ["boxed"]}, "distill": {}, "kvpop": {}}
    cache = {"policy": "kvpop", "budget": 32, "window": 4}
    for kind, more in kinds.items():
        shared = {"kind": kind, "model": "m", "output_dir": "o", "cache": cache, **more}
        for own, applied in ((None, 200), (7, 7), (900, 900)):
            validation = {"data": {"path": "held_out.jsonl", "max_prompt_tokens": own}, "problems": 8}
            recipe = make_recipe(
                {**shared, "data": {"path": "x.jsonl", "max_prompt_tokens": 200}, "validation": validation}
            )
            assert recipe.validation.data.max_prompt_tokens == applied
            assert make_recipe(recipe.resolved()) == recipe
            assert kind != "grpo" or recipe.evaluation("run")["tasks"]["validation"]["max_prompt_tokens"] == applied
        free = make_recipe({**shared, "data": {"path": "x.jsonl"}, "validation": {"data": {"path": "held_out.jsonl"}}})
        assert free.validation.data.max_prompt_tokens is None


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, "data.max_prompt_tokens"),
        ({"validation": {"data": {"path": "v.jsonl"}}}, "data.max_prompt_tokens, validation.data.max_prompt_tokens"),
        ({"data": SYNTHETIC, "validation": {"data": {"path": "v.jsonl"}}}, "validation.data.max_prompt_tokens"),
        ({"data": {"path": "x.jsonl", "max_prompt_tokens": 50}, "validation": {"data": {"path": "v.jsonl"}}}, None),
        ({"data": SYNTHETIC}, None),
        ({"rollout": {"max_model_len": 300}}, None),
        ({"rollout": {"engine": "hf"}}, None),
    ],
)
def test_an_unbounded_length_of_vllm_is_one_remark_with_its_key_and_its_price(keys, named, machine):
    """64 sequences and a shared prompt take up to 131,072 entries each of 2 layers x 2 kv heads x 2 x 32 bf16 numbers.
    Control: no remark for less than 1 GB, as of 8 sequences."""
    machine("cpu")
    few = grpo(**{"data": {"path": "x.jsonl"}, **keys, "rollout": {**keys.get("rollout", {}), "max_batch": 8}})
    assert few.resolve(config(), cuda=False).remarks == []
    remarks = grpo(**{"data": {"path": "x.jsonl"}, **keys}).resolve(config(), cuda=False).remarks
    assert len(remarks) == (named is not None)
    price = (65 * 2**17 + 16) * 2 * 2 * 2 * 32 * 2 / 1e9
    assert named is None or remarks == [
        f"{named}: not set, so vLLM plans its cache for 131,072 tokens a sequence, up to {price:.1f} GB"
    ]


def test_memory_counts_the_engines_copy_of_the_weights(machine):
    machine("cpu")
    model = RunningSum.untrained(0).config

    def items(make: Callable = grpo, **keys: Any) -> dict[str, Any]:
        return {item.name: item for item in plan(make(dtype="float32", **keys), model, cuda=False).items}

    with_vllm = items(rollout={"kv_cache_gb": 0.5})
    assert with_vllm["vllm: weights"].device == 4 * 102_848  # 4 bytes for each parameter
    assert with_vllm["vllm: weights"].when == "always"
    assert (
        with_vllm["vllm: KV pool"].device == ((64 + 1) * 32 + 1) * 32 * 4 * 2 * 32 * 4
    )  # 1024 tokens each, and a shared prompt
    cache = next(item for name, item in with_vllm.items() if name.startswith("KV cache"))
    assert cache.device == 0  # it lies in the pool
    assert items(rollout={"max_batch": 10_000})["vllm: KV pool"].device == 2**30
    assert items(rollout={"max_batch": 10_000, "kv_cache_gb": 0.5})["vllm: KV pool"].device == 2**29
    assert items(rollout={"sleep": True})["vllm: weights"].when == "sampling"
    assert "gathered weights" not in items(launch={"zero_stage": 3})
    with_hf = items(rollout={"engine": "hf"}, launch={"zero_stage": 3})
    assert not any(name.startswith("vllm") for name in with_hf)
    assert "gathered weights" in with_hf
    spread = items(evaluation, rollout={"tensor_parallel": 2}, max_completion_length=100)
    assert spread["vllm: weights"].device == 2 * 102_848
    assert "weights" not in spread
    asking = items(rollout={"servers": ["http://one:8000"]}, launch={"zero_stage": 3})
    assert (asking["weights for servers"].device, asking["weights for servers"].host) == (0, 4 * 102_848)
    assert not any(name.startswith(("KV cache", "vllm", "gathered")) for name in asking)
    assert "weights for servers" in items(evaluation, rollout={"servers": ["http://one:8000"]}, max_completion_length=9)


def test_the_quickstarts_model_has_the_smallest_head_that_vllm_supports_on_a_cpu():
    assert min(CPU_HEAD_SIZES) == 32 == RunningSum.untrained(0).config.head_dim
