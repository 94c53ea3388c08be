"""`compile_ahead` compiles the attention kernels before the first training step. The steps then compile no graph."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tiny import new_model
from torch._dynamo.utils import counters
from traces import trace_of

from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.startup import compile_ahead
from sparse_rl.attention.views import make_view
from sparse_rl.kernels import flex
from sparse_rl.kernels.flex import flex_attend


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.few(1)
def test_steps_compile_no_graph_after_compile_ahead(
    autocast: bool, flex_trains: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients (under checkpointing) or without. Control: a step of 3 rows compiles one."""
    traced = torch.compile(flex._attend, backend="aot_eager", dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda _: traced)
    by_graph = lambda *args, compiled, **kwargs: flex_attend(*args, compiled=True, **kwargs)  # noqa: E731
    monkeypatch.setattr("sparse_rl.kernels.masked.flex_attend", by_graph)
    model = adopt(new_model("qwen3", num_hidden_layers=2, head_dim=16)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch._dynamo.reset()
    counters.clear()
    device_and_dtype = torch.device("cpu"), torch.float32

    def step(rows: int, width: int) -> None:
        traces = [trace_of(width, layers=2, seed=i) for i in range(rows)]
        view = make_view(traces, [0] * rows, width, "cpu", "flex_sorted")
        ids = torch.full((rows, width), 5)
        out = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
        if torch.is_grad_enabled():
            out.float().square().mean().backward()

    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        compile_ahead("flex_sorted", model.config, 2, 300, *device_and_dtype)
        before = counters["stats"]["unique_graphs"]
        assert before == 2
        for width in (300, 257):
            step(2, width)
            with torch.no_grad():
                step(2, width)
        assert counters["stats"]["unique_graphs"] == before
        step(3, 300)  # control
        assert counters["stats"]["unique_graphs"] == before + 1
