"""A Hopper GPU that is not there, for programs that compile for it: `start` makes PyTorch and Triton believe in it.

`python fake_cuda.py CASE...` compiles FlexAttention's kernels for it; a case is KIND,DTYPE,HEAD_DIM (see `call`). As on
a GPU, PyTorch's compiler makes the kernels of the forward and backward pass, here from tensors that have a shape and no
memory, and Triton compiles them. A line of JSON for each case tells what its kernels use.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEVICE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
const Device device(DeviceType::CUDA, 0);
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, device); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
using namespace at;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, REGISTRY_PREFERRED, Hooks)
static impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());
"""
HOPPER = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block_optin=227 * 1024, gcnArchName="",
)  # fmt: skip
ANSWERS: dict[str, Any] = {
    **dict.fromkeys(("is_available", "is_triton_capable"), True),
    **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0),
    **dict.fromkeys(("raise_if_triton_unavailable", "_lazy_init", "set_rng_state"), None),
    **{"device_count": 1, "get_device_capability": (9, 0), "get_compute_capability": 90},
    **{"get_device_properties": HOPPER, "get_device_name": HOPPER.name},
}


def load_device() -> None:
    """Compile and load `DEVICE`, also in the place of NVIDIA's driver, which vLLM's libraries want to find."""
    torch = Path(find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    sys.setdlopenflags(os.RTLD_LAZY)  # the driver's functions are never called, and so not looked for
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "device.cpp"), Path(folder, "device.so")
        source.write_text(DEVICE)
        flags = ["-std=c++20", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
        flags += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        subprocess.run(["c++", *flags, source, "-o", library], check=True)
        for path in (torch / "lib/libtorch_global_deps.so", torch / "lib/libtorch.so", library):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def start() -> None:
    """Must run before PyTorch is imported, hence the imports in functions."""
    load_device()
    import torch
    import torch._functorch.config
    import torch._inductor.config
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    for name, value in {**ANSWERS, "get_rng_state": torch.zeros(16, dtype=torch.uint8)}.items():
        for owner in (torch.cuda, CudaInterface, CudaInterface.Worker):
            setattr(owner, name, staticmethod(lambda *_, value=value, **__: value))
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    triton_helpers.set_driver_to_gpu = lambda: None
    joint_graph.lazy_init = lambda *_: None  # patterns to replace, which it finds by computing on the device
    torch._inductor.config.joint_graph_constant_folding = False
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.use_static_triton_launcher = False  # which forgets the compiled code
    torch._functorch.config.force_non_lazy_backward_lowering = True


def call(kind: str, dtype: Any, dim: int) -> None:
    """Attend in 2 sequences of 2,048 tokens, with 12 query heads and 2 kv heads.

    kind : train (forward and backward pass), lse (log-sum-exp, forward pass) or mass (the transposed pass)
    """
    import torch

    from sparse_rl.kernels import flex

    def made(*shape: int, dtype: Any = dtype) -> Any:
        return torch.empty(*shape, device="cuda", dtype=dtype)

    query, key, value = (made(2, heads, 2048, dim).requires_grad_(kind == "train") for heads in (12, 2, 2))
    if kind == "mass":
        lse, first, last = made(2, 12, 2048, dtype=torch.float32), *made(2, 2, 2048, dtype=torch.int64)
        flex.mass_by_flex(query, key, lse, first, last, dim**-0.5, 40.0)
    if kind == "lse":
        value = value[..., : flex.VALUE_DIM]
    evict_at = made(2, 2, 2048, dtype=torch.int32)
    flex.flex_attend(evict_at, query, key, value, dim**-0.5, in_segments=True, want_lse=kind == "lse")


class Stopped(Exception):
    """Raised where a compiled graph would run."""


def kernels(case: str) -> dict[str, dict[str, int]]:
    """Return what each kernel of FlexAttention in the graphs of a case uses."""
    import torch
    from compiling import usage
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    sources = []

    def keep(graph: Any) -> Any:
        sources.append(graph.codegen()[0].value)
        return SimpleNamespace(call=stop, __file__="", __path__="")

    def stop(*_: Any) -> None:
        raise Stopped

    GraphLowering.compile_to_module = keep
    torch._dynamo.reset()
    kind, dtype, dim = case.split(",")
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Stopped):
        call(kind, getattr(torch, dtype), int(dim))
    used = {}
    for name, kernel in re.findall(r"async_compile\.triton\('(triton_tem_\w+)', '''(.*?)'''", "".join(sources), re.S):
        tuner = getattr(PyCodeCache.load(kernel), name)
        (configuration,) = tuner.configs
        used[name] = usage(tuner._precompile_config(configuration).kernel)
    return used


if __name__ == "__main__":
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    start()
    for case in sys.argv[1:]:
        print(json.dumps(kernels(case)), flush=True)
