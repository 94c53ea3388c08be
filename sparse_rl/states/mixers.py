"""Mixers, the modules that hold a state, in sampler and trainer: they compute whole sequences, or one token each.

No family passes the forward keyword `kv_view` on to its mixers. So a hook before each decoder layer hands the layer's
own `kv_view` to its mixer, in the forward pass and again in a recomputed one, as for routers (sparse_rl/experts.py).
What the view carries as `states` then calls the mixer:

- in training, `Sequences`: each sequence of a padded or packed row is cut out, computed and laid back. transformers
  masks nothing beside a 4D mask, and on a CPU silently ignores where the documents of a row begin;
- in the hf engine, `States`: prompts of equal length are prefilled together, and a step moves each row's state on.

A mixer keeps its module of transformers, whose class becomes a subclass. Only the functions between its projections are
replaced, in float32 on a CPU, by ours in float64 (convolution.py, delta.py, mamba2.py).

Sizes in shapes: B rows, T tokens of a row in this call, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparse_rl.errors import StoppedError
from sparse_rl.kernels.exact import computing_dtype, padded_layers
from sparse_rl.states import convolution, delta, mamba2
from sparse_rl.trace import TraceError

# model_type -> (name of the mixer in a decoder layer, its kind)
MIXERS: dict[str, tuple[str, ModuleType]] = {
    "qwen3_next": ("linear_attn", delta),
    "qwen3_5_text": ("linear_attn", delta),
    "olmo_hybrid": ("linear_attn", delta),
    "granitemoehybrid": ("mamba", mamba2),
    "bamba": ("mamba", mamba2),
    "falcon_h1": ("mamba", mamba2),
    "nemotron_h": ("mixer", mamba2),
    "lfm2": ("conv", convolution),
}
Call = Callable[..., Tensor]  # hidden states [B, T, H], and a State or None -> [B, T, H]


class State:
    """The state of B sequences in one layer, in the form in which a mixer of transformers reads and writes it.

    conv_states : {0: the last inputs of the convolution, [B, channels, taps], or None before a prompt}
    recurrent_states : {0: the state itself, [B, ...], or None}
    """

    record_past = False  # transformers reads it

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        self.conv_states, self.recurrent_states = {0: conv}, {0: recurrent}
        self.layers: Mapping[int, State] = _Everywhere(self)

    def has_previous_state(self, layer: int | None = None, state_idx: int = 0) -> bool:
        return self.conv_states[0] is not None

    def update_conv_state(self, inputs: Tensor, layer: int, conv_kernel_size: int, state_idx: int = 0) -> Tensor:
        """Keep the last inputs of a prompt [B, channels, T]. Returns all, with zeros in front of a short prompt."""
        inputs = F.pad(inputs, (max(0, conv_kernel_size - inputs.shape[-1]), 0))
        self.conv_states[0] = inputs[..., -conv_kernel_size:].clone()
        return inputs

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> None:
        if state.dtype not in (torch.float32, torch.float64):
            raise StoppedError(
                f"layer {layer_idx} has a state in {state.dtype}, which would lose its tokens' small parts"
            )
        self.recurrent_states[0] = state

    def rows(self, rows: Sequence[int]) -> State:
        return State(*(None if part is None else part[list(rows)] for part in self.parts()))

    def parts(self) -> tuple[Tensor | None, Tensor | None]:
        return self.conv_states[0], self.recurrent_states[0]

    @classmethod
    def joined(cls, states: Sequence[State]) -> State:
        """Return the state of the rows of several states, one after the other."""
        parts = zip(*(state.parts() for state in states), strict=True)
        return cls(*(None if part[0] is None else torch.cat(part) for part in parts))


class _Everywhere(dict[int, State]):
    """Has one state as that of each layer, so that no mixer reads another layer's, as OLMo's does."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def __missing__(self, layer: int) -> State:
        return self.state


class States:
    """The states of all layers that have one, for the rows of a batch that is sampled. A cache carries it."""

    def __init__(self, of_layer: dict[int, State] | None = None) -> None:
        self.of_layer = of_layer or {}
        self._prompts: list[int] | None = None  # lengths of the prompts that are read; None in decoding

    def begin_prefill(self, prompt_lengths: Sequence[int]) -> None:
        """Prepare for a forward pass over whole prompts, right-padded."""
        assert not self.of_layer, "a state cannot read a prompt in pieces"
        self._prompts = list(prompt_lengths)

    def begin_decode(self) -> None:
        """Prepare for a forward pass over one token per row. A row that has ended is never read again."""
        self._prompts = None

    def mix(self, layer: int, hidden: Tensor, call: Call) -> Tensor:
        """Return a mixer's output for hidden states [B, T, H]; prompts of equal length are computed together."""
        if self._prompts is None:
            return call(hidden, self.of_layer[layer])
        out, states, order = torch.zeros_like(hidden), list[State](), list[int]()
        for length in sorted(set(self._prompts)):
            rows = [row for row, own in enumerate(self._prompts) if own == length]
            states.append(State())
            out[rows, :length] = call(hidden[rows, :length], states[-1])
            order += rows
        places = sorted(range(len(order)), key=order.__getitem__)
        self.of_layer[layer] = State.joined(states).rows(places)
        return out

    def select(self, rows: Sequence[int]) -> None:
        self.of_layer = {layer: state.rows(rows) for layer, state in self.of_layer.items()}

    def fork(self, rows: Sequence[int]) -> States:
        forked = States(self.of_layer)
        forked.select(rows)
        return forked

    @classmethod
    def joined(cls, states: Sequence[States]) -> States:
        """Return the states of the rows of several batches, one after the other."""
        return cls({layer: State.joined([one.of_layer[layer] for one in states]) for layer in states[0].of_layer})

    def allocated_bytes(self) -> int:
        parts = (part for state in self.of_layer.values() for part in state.parts())
        return sum(part.untyped_storage().nbytes() for part in parts if part is not None)


class Sequences:
    """The sequences in the rows of a training batch. A view carries it.

    spans : (row, first column, column after the last token) of each sequence
    """

    def __init__(self, spans: Iterable[tuple[int, int, int]]) -> None:
        self.spans = list(spans)

    @classmethod
    def right_padded(cls, lengths: Iterable[int]) -> Sequences:
        return cls((row, 0, length) for row, length in enumerate(lengths))

    def mix(self, layer: int, hidden: Tensor, call: Call) -> Tensor:
        """Return a mixer's output for hidden states [B, T, H], as if each sequence stood alone; 0 in padding."""
        if [(row, first) for row, first, _ in self.spans] == [(row, 0) for row in range(len(hidden))]:
            return call(hidden, None)  # what stands behind a sequence does not enter it
        row, first, end = torch.tensor(self.spans, device=hidden.device).T
        column = first[:, None] + torch.arange(int((end - first).max()), device=hidden.device)
        real = column < end[:, None]
        rows = row[:, None].expand_as(column)
        mixed = call(hidden[rows, column.clamp(max=hidden.shape[1] - 1)], None)
        return torch.zeros_like(hidden).index_put((rows[real], column[real]), mixed[real])


class Mixer(nn.Module):
    """Base class of transformers' mixers after `attach`."""

    kind: ModuleType
    cache_name: str  # of forward's argument for a cache
    plain: Any  # transformers' own forward, a function, without its decorators
    kv_view: Any = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.kv_view is None:
            out: Tensor = super().forward(hidden_states, *args, **kwargs)
            return out
        if self.kv_view.states is None:
            view = type(getattr(self.kv_view, "of_policy", self.kv_view)).__name__
            raise TraceError(f"{view} does not say where sequences begin, which the model's layers with a state need")
        mixed: Tensor = self.kv_view.states.mix(self.layer_idx, hidden_states, self.mix)
        return mixed

    def mix(self, hidden: Tensor, state: State | None) -> Tensor:
        """Return the output [B, T, H] for whole sequences, or with a state of earlier tokens for one token per row."""
        exact = computing_dtype(hidden, hidden) == torch.float64
        forward = _with_functions(type(self).plain, self.kind.functions(self, exact))
        with padded_layers(hidden.shape[:2].numel(), hidden.device), _Gates():
            out: Tensor = forward(self, hidden, **{self.cache_name: state})
        return out

    def begin(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.kv_view = kwargs.get("kv_view")

    def end(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.kv_view = None


class _Gates(TorchFunctionMode):
    """Computes gates in float64: on a CPU, a function of few numbers takes another path than one of many."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in GATES or args[0].dtype != torch.float32 or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        x, *rest = args
        return func(x.double(), *rest, **(kwargs or {})).to(x.dtype)


GATES = (torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.softplus)


def _with_functions(forward: FunctionType, functions: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """Return a function with other globals; the module of its class, and all its other users, stay as they are."""
    made = FunctionType(
        forward.__code__,
        {**forward.__globals__, **functions},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@cache
def _subclass(base: type[nn.Module], kind: ModuleType) -> type[Mixer]:
    plain = inspect.unwrap(base.forward)
    names = inspect.signature(plain).parameters
    cache_name = next((name for name in ("cache_params", "past_key_values") if name in names), None)
    unused = sorted(kind.FUNCTIONS.keys() - set(plain.__code__.co_names))
    if cache_name is None or unused:
        lacks = ", ".join(unused) or "a cache"
        raise StoppedError(f"{base.__name__} of this version of transformers does not use {lacks}")
    members = {"kind": kind, "cache_name": cache_name, "plain": staticmethod(plain)}
    return type(base.__name__, (Mixer, base), members)


def mixers(model: Any) -> Iterator[tuple[nn.Module, Any, ModuleType]]:
    """Yield (decoder layer, mixer, its kind) for each layer of a model with a state."""
    if (entry := MIXERS.get(model.config.model_type)) is not None:
        name, kind = entry
        for layer in model.get_decoder().layers:
            if hasattr(mixer := getattr(layer, name, None), "conv_kernel_size"):
                yield layer, mixer, kind


def attach(model: Any) -> None:
    """Let views and caches call the mixers of a model. A second call changes nothing.

    Raises StoppedError if a mixer does not use the functions that ours stand in for.
    """
    for layer, mixer, kind in mixers(model):
        if not isinstance(mixer, Mixer):
            own: Any = type(mixer)
            mixer.__class__ = _subclass(own, kind)
            layer.register_forward_pre_hook(mixer.begin, with_kwargs=True)
            layer.register_forward_hook(mixer.end, always_call=True)


def sequence_numbers(model: Any) -> tuple[int, int]:
    """Return how many numbers the states of one sequence have in all layers of a model: recurrent states, and the last
    inputs of convolutions.
    """
    recurrent = inputs = 0
    for _, mixer, kind in mixers(model):
        convolved = getattr(mixer, "conv1d", None) or mixer.conv
        recurrent, inputs = recurrent + kind.numbers(mixer), inputs + convolved.in_channels * mixer.conv_kernel_size
    return recurrent, inputs
