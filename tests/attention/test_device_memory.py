"""A view copies one layer's slice of evict_at at a time to the device, and makes one mask at a time. A dispatch mode
records every tensor that an operator makes, and which storages are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from tiny import new_model
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from traces import starts_of, trace_of
from transformers import PreTrainedModel

from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.views import ReplayView
from sparse_rl.kernels import masked
from sparse_rl.trace import EvictionTrace, batch_traces

OWNED = (torch.bool, torch.int32)  # the dtypes of masks and traces; no other tensor in these models has these dtypes


class Alive(TorchDispatchMode):
    """Storages of operators' tensors that are alive, by `kind` (None ignores a tensor); views of `host` are ignored."""

    def __init__(self, kind: Callable[[torch.Tensor], str | None], host: torch.Tensor) -> None:
        super().__init__()
        self.kind, self.host = kind, host.untyped_storage()._cdata
        self.storages: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self.most: dict[str, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        new_tensors = [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor) and self.kind(tensor)]
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        for tensor in new_tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.storages and storage._cdata != self.host:
                self.storages[storage._cdata] = (StorageWeakRef(storage), self.kind(tensor) or "", storage.nbytes())
        for kind in {entry[1] for entry in self.storages.values()}:
            count = sum(entry[1] == kind for entry in self.storages.values())
            self.most[kind] = max(self.most.get(kind, 0), count)
        self.peak_bytes = max(self.peak_bytes, sum(entry[2] for entry in self.storages.values()))
        return out


def train_step(model: PreTrainedModel, view: Any, batch: int, width: int) -> None:
    """Run the forward and backward pass of a full-length batch."""
    ids = torch.arange(batch * width).view(batch, width) % 60 + 3
    logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def set_checkpointing(model: PreTrainedModel, on: bool) -> PreTrainedModel:
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


under_masks = partial(ReplayView, kernel="sdpa")


class KeepsEveryMask(ReplayView):
    """Control: makes the masks of all layers at once, as the published code does."""

    def __init__(self, batch: Mapping[str, torch.Tensor], device: torch.device | str) -> None:
        super().__init__(batch, device)
        self.masks = [masked.visible_mask(layer.clone()) for layer in batch["evict_at"]]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        mask = self.masks[layer].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)


class FetchesEverything(ReplayView):
    """Control: copies every layer's evict_at to the device and keeps it there."""

    def layer(self, index: int) -> torch.Tensor:
        if not self._fetched:
            self._fetched = {i: layer.to(self.device, copy=True) for i, layer in enumerate(self.evict_at)}
        return self._fetched[index]


class KeepsMasksForBackward(ReplayView):
    """Control: autograd saves each layer's mask for the backward pass, instead of making the mask again."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return masked._by_sdpa(lambda: self.layer(layer), query, key, value, scaling)


LAYERS, BATCH, KV_HEADS, WIDTH = 6, 3, 2, 37


def most_alive(
    model: PreTrainedModel, view_class: Callable, traces: Iterable[EvictionTrace], starts: Iterable[int]
) -> dict[str, int]:
    """Return the largest number of tensors of one kind alive at once in a training step."""

    def kind(tensor: torch.Tensor) -> str | None:
        if tensor.numel() == BATCH * KV_HEADS * WIDTH * WIDTH and tensor.shape[-2:] == (WIDTH, WIDTH):
            return "mask" if tensor.dtype == torch.bool else "float mask"
        if tensor.dtype == torch.int32 and tensor.shape == (BATCH, KV_HEADS, WIDTH):
            return "evict_at"
        return None

    batch = batch_traces(list(traces), list(starts), WIDTH)
    with Alive(kind, batch["evict_at"]) as alive:
        train_step(model, view_class(batch, "cpu"), BATCH, WIDTH)
    return {name: alive.most.get(name, 0) for name in ("mask", "float mask", "evict_at")}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_at_most_one_mask_and_two_slices_of_evict_at_are_alive(checkpointing: bool) -> None:
    """The slices are those of the layer that runs and the next. Controls: views that hold all masks or slices, and
    without checkpointing one that holds its masks."""
    model = set_checkpointing(adopt(new_model("qwen3", num_hidden_layers=LAYERS)), checkpointing)
    lengths = (37, 20, 30)
    traces = [trace_of(n, layers=LAYERS) for n in lengths]
    for side in ("left", "right"):
        starts = starts_of(side, lengths)
        assert most_alive(model, under_masks, traces, starts) == {"mask": 1, "float mask": 1, "evict_at": 2}

    # controls
    assert most_alive(model, KeepsEveryMask, traces, starts)["mask"] >= LAYERS
    assert most_alive(model, FetchesEverything, traces, starts)["evict_at"] >= LAYERS
    kept = most_alive(model, KeepsMasksForBackward, traces, starts)["float mask"]
    assert kept == (1 if checkpointing else LAYERS)


def test_layers_without_evictions_make_no_mask_and_fetch_no_slice() -> None:
    """If layers 1, 4 and 5 have evictions, the other layers add none."""
    model = set_checkpointing(adopt(new_model("qwen3", num_hidden_layers=LAYERS)), True)
    without_evictions = [trace_of(WIDTH, layers=LAYERS, causal=range(LAYERS)) for _ in range(BATCH)]
    expected = {"mask": 0, "float mask": 0, "evict_at": 0}
    assert most_alive(model, under_masks, without_evictions, [0] * BATCH) == expected
    in_some_layers = [trace_of(WIDTH, layers=LAYERS, causal=[0, 2, 3]) for _ in range(BATCH)]
    expected = {"mask": 1, "float mask": 1, "evict_at": 2}
    assert most_alive(model, under_masks, in_some_layers, [0] * BATCH) == expected


class Copies(TorchDispatchMode):
    """The layers whose slices were copied out of a batch of traces."""

    def __init__(self, batch: torch.Tensor) -> None:
        super().__init__()
        self.batch, self.layers = batch, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].untyped_storage()._cdata == self.batch.untyped_storage()._cdata
        ):
            self.layers.append(args[0].storage_offset() // self.batch.stride(0))
        return func(*args, **(kwargs or {}))


def test_each_layers_slice_is_fetched_one_layer_ahead() -> None:
    """Upwards in the forward pass, downwards in the backward pass, except where a direction begins: the first layer
    forward, and the second one backward, whose slices are copied when their layers run."""
    batch = batch_traces([trace_of(WIDTH, layers=LAYERS)], [0], WIDTH)
    view, top, evict_at = ReplayView(batch, "cpu"), LAYERS - 1, batch["evict_at"]
    up, down = list(range(LAYERS)), [i for i in reversed(range(LAYERS)) for _ in range(2)]
    fetched = []
    for index in up + down:
        with Copies(evict_at) as copies:
            assert torch.equal(view.layer(index), evict_at[index])
        fetched += copies.layers
        assert index not in copies.layers or (index, len(fetched)) in {(0, 2), (top - 1, LAYERS + 2)}
    assert sorted(fetched) == sorted([*up, *range(top)])


def peak_bytes(model: PreTrainedModel, view_class: Callable, traces: list[EvictionTrace], width: int) -> int:
    """Peak bytes of all bool and int32 tensors that a training step makes, temporaries included."""
    batch = batch_traces(traces, [0] * len(traces), width)
    with Alive(lambda tensor: str(tensor.dtype) if tensor.dtype in OWNED else None, batch["evict_at"]) as alive:
        train_step(model, view_class(batch, "cpu"), len(traces), width)
    return alive.peak_bytes


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_peak_memory_is_at_most_a_twelfth_of_the_dense_masks(checkpointing: bool) -> None:
    """With 16 layers and 256 tokens. Control: a view that holds all masks."""
    layers, batch, kv_heads, width = 16, 4, 2, 256
    model = set_checkpointing(adopt(new_model("qwen3", num_hidden_layers=layers)), checkpointing)
    traces = [trace_of(width, layers=layers, seed=i) for i in range(batch)]
    dense = layers * batch * kv_heads * width * width
    assert dense / 18 < peak_bytes(model, under_masks, traces, width) <= dense / 12
    assert peak_bytes(model, KeepsEveryMask, traces, width) >= dense  # control


@pytest.mark.slow
def test_peak_memory_is_at_most_a_twelfth_of_the_dense_masks_at_2048_tokens() -> None:
    """The documented measurement: 4 sequences x 16 layers x 2 kv heads."""
    layers, batch, kv_heads, width = 16, 4, 2, 2048
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": layers}
    model = set_checkpointing(adopt(new_model("qwen3", **tiny)), True)
    traces = [trace_of(width, layers=layers, seed=i) for i in range(batch)]
    peak = peak_bytes(model, under_masks, traces, width)
    assert peak <= layers * batch * kv_heads * width * width / 12
