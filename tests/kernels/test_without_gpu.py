"""Proofs about GPU code without a GPU: it compiles for one, and fits into its registers and shared memory."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from without_gpu import run

pytest.importorskip("triton.backends.nvidia", reason="compiling needs Triton with its NVIDIA backend")
import compiling
from compiling import exceeded

from sparse_rl.kernels import redundancy_triton, topk_triton

pretended = pytest.mark.skipif(
    shutil.which("c++") is None or torch.cuda.is_available(), reason="needs c++ to make a device where there is none"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert Path(compiling.TOOL).exists()


def test_the_running_topk_fits_into_a_gpu() -> None:
    (used,) = compiling.topk()
    assert used["REG"] > 0
    assert not exceeded(used)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128, 256, pytest.param(72, marks=pytest.mark.slow)])
@pytest.mark.few(2)
def test_redundancy_fits_into_a_gpu(dim: int, dtype: str) -> None:
    """And two programs on one multiprocessor, which has 65,536 registers and 228 kB. No kernel takes float32 keys, and
    72 is no multiple of 16, so that fewer bytes are loaded at a time."""
    for used in compiling.redundancy(dim, dtype):
        assert not exceeded(used)
        assert 2 * used["REG"] * 32 * redundancy_triton.WARPS <= 65_536
        assert 2 * used["SHARED"] <= 228 * 1024


@pytest.mark.slow
def test_kernels_fit_into_the_generation_before() -> None:
    """Ampere (sm_80) has 163 kB for a program."""
    for used in compiling.topk(80) + compiling.redundancy(128, "bf16", 80):
        assert not exceeded(used)
        assert used["SHARED"] <= 163 * 1024


def test_control_keys_that_are_too_long_exceed_shared_memory() -> None:
    assert [exceeded(used) for used in compiling.redundancy(1024)] == [set(), {"SHARED"}]


@pytest.mark.slow
def test_control_tiles_that_are_too_large_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_triton, "BLOCK", 16384)
    assert all({"STACK", "LOCAL"} & exceeded(used) for used in compiling.topk())
    monkeypatch.setattr(redundancy_triton, "COLUMNS", 128)
    monkeypatch.setattr(redundancy_triton, "WARPS", 4)
    assert [exceeded(used) for used in compiling.redundancy(128)] == [set(), {"STACK"}]


# ---- in a process that believes in a GPU (fake_cuda.py) --------------------------------------------------------------


@pytest.mark.slow
@pretended
def test_flex_attention_fits_into_a_gpu() -> None:
    """Forward and backward pass, the log-sum-exp, and the transposed pass. Control: heads of 512 do not fit."""
    cases = [f"train,bfloat16,{dim}" for dim in (64, 128, 256)]
    cases += ["train,float32,128", "lse,bfloat16,128", "mass,bfloat16,128", "train,bfloat16,512"]
    program = "import runpy; runpy.run_module('fake_cuda', run_name='__main__')"
    *fitting, control = [list(json.loads(line).values()) for line in run(program, *cases).splitlines()]
    assert [len(used) for used in fitting] == [2, 2, 2, 2, 1, 1]  # a forward pass, and its backward pass
    for used in chain(*fitting):
        assert not exceeded(used) & {"REG", "SHARED"}
    for forward, *_ in (*fitting[:3], *fitting[4:]):  # with float32, and in backward passes, registers are spilled
        assert forward["STACK"] <= 64
    assert "SHARED" in exceeded(control[0])


CONFIGURES = """
import importlib, json, os, pkgutil, sys
import fake_cuda
fake_cuda.start()
import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

class Hopper(NonNvmlCudaPlatform):
    get_device_capability = classmethod(lambda *_, **__: DeviceCapability(9, 0))
    get_device_name = classmethod(lambda *_, **__: fake_cuda.HOPPER.name)
    get_device_total_memory = classmethod(lambda *_, **__: fake_cuda.HOPPER.total_memory)

vllm.platforms._current_platform = Hopper()
import rollout.vllm
for module in pkgutil.walk_packages(rollout.vllm.__path__, "rollout.vllm."):
    importlib.import_module(module.name)

from vllm.engine.arg_utils import EngineArgs
from rollout import make_engine
from rollout.vllm.compat import arguments

class Made(Exception):
    pass

def make(model, **options):
    raise Made(EngineArgs(model=model, **options).create_engine_config())

vllm.LLM = make

def modes(policy, full):
    try:
        make_engine("vllm", model=sys.argv[1], policy=policy, dtype="bfloat16", full_graphs=full)
    except Made as made:
        (config,) = made.args
        if policy["policy"] != "full":
            arguments.refuse_unsupported(config, full)
        compilation = config.compilation_config
        return [compilation.mode.name, compilation.cudagraph_mode.name, config.scheduler_config.async_scheduling]

for name, settings in {"gkv": {"window": 8}, "am": {"window": 8}, "streaming": {}}.items():
    policy = {"policy": name, "budget": 64, "period": 16, **settings}
    print(json.dumps([modes(policy, False), modes(policy, True)]))
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
modes(policy, False)
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
try:
    modes(policy, False)
except ValueError as error:
    print(json.dumps("PYTORCH_CUDA_ALLOC_CONF" in str(error)))
"""


@pytest.mark.slow
@pretended
@pytest.mark.skipif(torch.version.cuda is None, reason="needs the CUDA builds of PyTorch and vLLM")
def test_vllm_for_cuda_takes_our_configuration(tmp_path: Path) -> None:
    """All modules of the plugin load with it, too. It refuses expandable segments under their older name alone."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**shape, head_dim=64, num_hidden_layers=2, vocab_size=512, max_position_embeddings=1024)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    *made, refused = [json.loads(line) for line in run(CONFIGURES, str(tmp_path)).splitlines() if line[0] in "[t"]
    assert made == [[["VLLM_COMPILE", graphs, False] for graphs in ("PIECEWISE", "FULL_AND_PIECEWISE")]] * 3
    assert refused
