"""vLLM's mixture of experts: the record of the experts that tokens take, and on a CPU the trainer's arithmetic.

vLLM's own record (`enable_return_routed_experts`) needs prefix caching and vLLM's second model runner, which eviction
excludes. But vLLM's routers call the function `capture_fn`, if it is set, with the experts that they chose.

On a CPU vLLM would pack the experts' weights when it loads a model, and later updates of weights would be written over
the packed copies, as if these were the weights; nothing would fail, and the samples would be wrong.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.experts.products import experts_forward


class Captured:
    """The experts that the tokens of one step took: int16 [tokens, layers, K], -1 in layers without experts.

    The tensor keeps its address, so that a CUDA graph can write into it.
    """

    def __init__(self, tokens: int, layers: int, choices: int, device: torch.device) -> None:
        self.experts = torch.full((tokens, layers, choices), -1, dtype=torch.int16, device=device)

    def take(self, layer: int, experts: Tensor) -> None:
        """Store the choices of a layer's router, int [T, K], during the layer's forward pass."""
        self.experts[: len(experts), layer] = experts.to(torch.int16)


def capture(runner: Any) -> Captured | None:
    """Let the routers of a worker's model record their choices; returns None for a model without experts.

    Call this after the model is loaded, and before vLLM compiles it or captures CUDA graphs. On a GPU, fused kernels
    that choose experts themselves would not be recorded; `moe_backend: triton` (arguments.py) excludes them.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    layers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
    if not layers:
        return None
    model, tokens = runner.model_config, runner.vllm_config.scheduler_config.max_num_batched_tokens
    sizes = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
    captured = Captured(tokens, *sizes, runner.device)
    for module in layers:
        module.router.set_capture_fn(partial(captured.take, module.layer_id))
    return captured


def keep_experts_in_place() -> None:
    """Stop the CPU build from packing the weights of experts; compute experts and their weights as the trainer does."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, X86CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    plain: Any = CPUUnquantizedExperts
    plain.process_weights_after_loading = lambda self, layer: None
    plain._supports_grouped_gemm = classmethod(lambda cls, config: (True, None))
    plain.apply = _apply
    X86CPUUnquantizedExperts._supports_current_device = staticmethod(lambda: False)  # type: ignore[method-assign]
    cpu_router._softmax_topk = _softmax_topk


def _apply(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *_: Any,
    **__: Any,
) -> None:
    """Compute experts in place of `CPUUnquantizedExperts.apply`; vLLM defines the signature."""
    assert activation.value == "silu", activation
    layer = SimpleNamespace(gate_up_proj=w1, down_proj=w2, _apply_gate=_gated)
    output.copy_(experts_forward(layer, hidden_states, topk_ids, topk_weights))


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def _softmax_topk(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose experts as transformers does, by the softmax over all experts.

    renormalize : True divides the values of the chosen experts by their sum
    """
    weights, chosen = router_logits.softmax(-1, dtype=torch.float).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, chosen.to(torch.int32)
