"""Mixture of experts: the experts that a token takes are a decision, which the sampler records and the trainer replays.

A router that is close to a tie chooses other experts if its input differs in the last bit, and the log-probs then
differ by more than any rounding. So the choices are part of the trace (section `routed`), beside the evictions. The
weights of the chosen experts are numbers; both sides compute them from the router's logits, with gradients in training.

The forward keyword `kv_view` is passed to every decoder layer, but no family passes it on to its router. So a hook
before each decoder layer hands the layer's own `kv_view` to its router, in the forward pass and again in a recomputed
one: gradient checkpointing calls the layer again, with its hooks and keywords. An attribute that is set from outside
would be absent or stale in the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from sparse_rl.kernels.exact import ROWS
from sparse_rl.trace import TraceError, pinned

EXPERTS = "sparse_rl"
"""Name of `experts_forward` among transformers' implementations of experts."""
GROW = 128  # positions of a RouterRecord, added at a time


class RouterRecord:
    """Records the experts that each token takes while rows are sampled. A cache carries it (`KVView.routers`)."""

    def __init__(self, layers: int, choices: dict[int, Tensor] | None = None) -> None:
        self.layers = layers  # number of layers of the model, including those without experts
        self.choices = choices or {}  # layer -> int16 [B, S, K], the experts of each token that was fed
        self._rows = 0
        # row, place in this pass, and position in its sequence of each token that is recorded; None in a prefill
        self._arriving: Tensor | None = None

    def begin_prefill(self, seen: Sequence[int]) -> None:
        """Prepare for a forward pass over whole prompts; `seen` counts the tokens of each row after the pass."""
        self._rows, self._arriving = len(seen), None

    def begin_chunk(self, seen: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        """Prepare for a forward pass over the next `counts` tokens of each row, right-padded; 0 if a row has ended."""
        self._rows = len(seen)
        rows = enumerate(zip(seen, counts, strict=True))
        arriving = [(row, place, n - width + place) for row, (n, width) in rows for place in range(width)]
        self._arriving = torch.tensor(arriving, device=device).T
        if self.choices and (missing := max(seen) - next(iter(self.choices.values())).shape[1]) > 0:
            extra = 0, 0, 0, max(missing, GROW)
            self.choices = {layer: F.pad(record, extra, value=-1) for layer, record in self.choices.items()}

    def route(self, layer: int, own: Tensor, logits: Tensor) -> Tensor:
        """Record the router's own choices, int64 [T, K] for the T tokens of all rows, row by row, and return them."""
        choices = own.to(torch.int16).view(self._rows, -1, own.shape[-1])
        if self._arriving is None:
            self.choices[layer] = choices
        else:
            row, place, position = self._arriving
            self.choices[layer][row, position] = choices[row, place]
        return own

    def select(self, rows: Sequence[int]) -> None:
        self.choices = {layer: record[list(rows)] for layer, record in self.choices.items()}

    def fork(self, rows: Sequence[int]) -> RouterRecord:
        forked = RouterRecord(self.layers, self.choices)
        forked.select(rows)
        return forked

    @classmethod
    def joined(cls, records: Sequence[RouterRecord]) -> RouterRecord:
        rows = {i: [row for record in records for row in record.choices[i]] for i in records[0].choices}
        padded = {layer: pad_sequence(of_layer, True, padding_value=-1) for layer, of_layer in rows.items()}
        return cls(records[0].layers, padded)

    def routed(self, row: int, length: int) -> Tensor:
        """Return the trace section `routed` of one row of `length` tokens: int16 [layers, length, K]."""
        width = next(iter(self.choices.values())).shape[-1]
        routed = torch.full((self.layers, length, width), -1, dtype=torch.int16)
        for layer, record in self.choices.items():
            routed[layer, : length - 1] = record[row, : length - 1].cpu()
        return routed


class RouterReplay:
    """Lets tokens take their recorded experts in training. A view carries it (`KVView.routers`).

    routed : recorded experts, int16 [L, B, S, K] in host memory; -1 stands for the router's own choice: in padding, and
        for the last token of a sequence
    """

    def __init__(self, routed: Tensor, device: torch.device | str) -> None:
        self.routed, self.device = pinned(routed, device), torch.device(device)
        self.highest = routed.amax(dim=(1, 2, 3)).tolist()
        # after a forward pass: layer -> (logits of the router [B S, experts], experts taken, int64 [B S, K])
        self.choices: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def unrecorded(cls, config: Any, ids: Tensor) -> RouterReplay:
        """Return a replay without a record for the tokens `ids` [B, S]: the routers choose themselves."""
        sizes = (config.num_hidden_layers, *ids.shape, config.num_experts_per_tok)
        return cls(torch.full(sizes, -1, dtype=torch.int16), ids.device)

    def route(self, layer: int, own: Tensor, logits: Tensor) -> Tensor:
        """Return the recorded experts of the T tokens of all rows, or the router's own choices: int64 [T, K].

        `logits` are the router's, [T, experts]. Raises TraceError if the record does not fit the model.
        """
        if layer >= len(self.routed):
            raise TraceError(f"routed has {len(self.routed)} layers, but the model has experts in layer {layer}")
        recorded = self.routed[layer].to(self.device, non_blocking=True).to(own.dtype).flatten(0, 1)
        if recorded.shape != own.shape or self.highest[layer] >= logits.shape[-1]:
            chose = f"its router chose {list(own.shape)} of {logits.shape[-1]} experts"
            has = f"routed has {list(recorded.shape)} experts up to {self.highest[layer]} in layer {layer}"
            raise TraceError(f"{has}, but {chose}")
        chosen = torch.where(recorded >= 0, recorded, own)
        self.choices[layer] = logits, chosen
        return chosen


def _softmax_over_all(router: Any, logits: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    weights = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always divides, and has no such setting
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(dtype)


def _sigmoid(router: Any, logits: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """GLM-4's correction bias takes part in the choice only."""
    weights = logits.sigmoid().gather(-1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return (weights * router.routed_scaling_factor).to(dtype)


def _softmax_over_chosen(router: Any, logits: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.gather(-1, chosen).softmax(-1).to(dtype)


# model_type -> function from (router, logits [T, experts], chosen [T, K], dtype) to the factors of the chosen experts,
# float [T, K]. It uses the family's own operations, so that equal choices have equal bits.
WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor, torch.dtype], Tensor]] = {
    "qwen3_moe": _softmax_over_all,
    "qwen2_moe": _softmax_over_all,
    "mixtral": _softmax_over_all,
    "olmoe": _softmax_over_all,
    "glm4_moe": _sigmoid,
    "qwen3_next": _softmax_over_all,
    "granitemoehybrid": _softmax_over_chosen,
}


def routers(model: Any) -> Iterator[tuple[int, nn.Module, Any]]:
    """Yield (index of the layer, decoder layer, router) for each layer with experts."""
    if model.config.model_type in WEIGHTS:
        for index, layer in enumerate(model.get_decoder().layers):
            block: Any = getattr(layer, "block_sparse_moe", None) or getattr(layer, "mlp", None)
            if hasattr(block, "experts"):
                yield index, layer, block.router if hasattr(block, "router") else block.gate


def has_experts(model: Any) -> bool:
    return next(routers(model), None) is not None


def routed_experts(model: Any) -> int:
    """Return the number of experts that one token takes in all layers together; 0 for a model without experts."""
    return sum(model.config.num_experts_per_tok for _ in routers(model))


def attach(model: Any) -> None:
    """Connect the routers of a model to `kv_view`, and let its experts run by `experts_forward`.

    A second call changes nothing. In a dense model, only the key `output_router_logits` is switched off.
    """
    for index, layer, router in routers(model):
        if hasattr(router, "routes"):
            continue
        router.routes = Routes(index, WEIGHTS[model.config.model_type])
        layer.register_forward_pre_hook(router.routes.begin, with_kwargs=True)
        layer.register_forward_hook(router.routes.end, always_call=True)
        router.register_forward_hook(router.routes.choose)
        if (gate := getattr(getattr(layer, "mlp", None), "shared_expert_gate", None)) is not None:
            gate.register_forward_hook(_repeat)
    if has_experts(model):
        model.set_experts_implementation(EXPERTS)
    # The model would compute a balancing loss from NO_MASK, which marks no token. Dense models may have this key, too.
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False


def _repeat(gate: nn.Linear, args: Any, output: Tensor) -> Tensor:
    """Repeat a gate [T, 1] for each number that it multiplies: a CPU's sigmoid rounds otherwise for few numbers."""
    return output if output.device.type != "cpu" else output.expand(-1, gate.in_features).contiguous()


class Routes:
    """Hands a layer's router what records or replays its choices, in the forward pass of its decoder layer."""

    def __init__(self, layer: int, weights_of: Callable[[Any, Tensor, Tensor, torch.dtype], Tensor]) -> None:
        self.layer, self.weights_of = layer, weights_of
        self.routers: RouterRecord | RouterReplay | None = None

    def begin(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        view = kwargs.get("kv_view")
        self.routers = None if view is None else view.routers

    def end(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.routers = None

    def choose(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        """Replace the router's output (logits, weights, choices), which Granite has in the reverse order, by the
        replayed choices; None keeps the output.
        """
        if self.routers is None:
            return None
        order = 1 if output[0].is_floating_point() else -1
        logits, weights, own = output[::order]
        chosen = self.routers.route(self.layer, own, logits)
        if chosen is own:
            return None
        return (logits, self.weights_of(router, logits, chosen, weights.dtype), chosen)[::order]


def balancing_loss(routed: Mapping[int, tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Compute the load-balancing loss (Switch Transformer, eqs. 4 to 6) for the experts that the tokens took.

    It equals transformers' `load_balancing_loss_func` bit for bit if these are the routers' own choices. Probabilities
    are the softmax of the logits.

    routed : layer -> (the router's logits [T, experts], the experts that were taken, int64 [T, K])
    mask : 1 for tokens and 0 for padding, [B, S] with B S = T
    """
    assert routed, "no router has run under a view that replays its choices"
    logits, _ = next(iter(routed.values()))
    real, experts = mask.reshape(-1).to(logits.device, torch.float32), logits.shape[-1]
    taken, chances = torch.zeros(experts, device=logits.device), torch.zeros(experts, device=logits.device)
    rows = torch.zeros((), device=logits.device)
    for layer in sorted(routed):
        logits, chosen = routed[layer]
        probabilities = logits.softmax(-1)
        counts = torch.zeros(experts, device=logits.device)
        taken = taken + counts.scatter_add_(0, chosen.reshape(-1), real.repeat_interleave(chosen.shape[-1]))
        chances = chances + (probabilities.float() * real[:, None]).sum(0)
        rows = rows + real.sum()
    return torch.sum(taken / rows * (chances / rows)[None]) * experts


def experts_forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted sum of each token's experts, [tokens, hidden size], on a CPU without rounding by batch.

    The tokens for which an expert was chosen form the expert's batch, so a sampler and a trainer never multiply
    matrices of equal shapes. transformers' `grouped_mm` and `eager` round differently for few rows: by up to 2e-5 of a
    log-prob on a trained model; `batched_mm` takes 4 to 5 times as long. On other devices transformers' own
    `grouped_mm` runs. transformers defines the signature: `chosen`, int [tokens, K], are the experts of each token, and
    `weights` their factors; the module holds gate_up_proj [experts, 2 I, hidden size] and down_proj.
    """
    if hidden.device.type != "cpu":
        return grouped_mm_experts_forward(module, hidden, chosen, weights)
    outputs, places = [], []
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        rows = F.pad(hidden[token], (0, 0, 0, -len(token) % ROWS))
        inner = module._apply_gate(F.linear(rows, module.gate_up_proj[expert]))
        output = F.linear(inner, module.down_proj[expert])[: len(token)]
        outputs.append(output * weights[token, choice, None])
        places.append(token * chosen.shape[1] + choice)
    by_choice = torch.cat(outputs)[torch.cat(places).argsort()]
    return by_choice.view(*chosen.shape, -1).sum(1).to(hidden.dtype)  # summed in the order of the router's choice


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
