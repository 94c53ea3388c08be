"""The adapter of vLLM's V1 model runner: no other file of the plugin reads the runner, or changes it.

*Log-probs that are not finite*: in place of the token, a worker sends NOT_FINITE, which needs no further copy from the
device; the scheduler ends the request (scheduler.py).

*Experts*: vLLM's own record of routed experts (`enable_return_routed_experts`) needs prefix caching, which eviction
excludes; ours uses the routers' `capture_fn`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler

from rollout.vllm.compat.arguments import KEY
from rollout.vllm.compat.paged import live_state
from rollout.vllm.sampling import NOT_FINITE, SeededSampler


class Row(NamedTuple):
    """The request of a row of logits.

    parameters : vLLM's SamplingParams of the request
    step : index of the token to sample in the completion
    """

    request_id: str
    parameters: Any
    step: int

    @property
    def settings(self) -> dict[str, Any] | None:
        return (self.parameters.extra_args or {}).get(KEY)


class Runner:
    """A worker's model runner, after its model is loaded. The sampler becomes ours."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.experts: Tensor | None = None  # of `capture`
        runner.sampler = self.sampler()

    def sampler(self) -> Any:
        return CheckedSampler(self)

    @property
    def model(self) -> Any:
        return self.runner.model

    @property
    def draw(self) -> Any:
        """The module that samples a token for each row of logits; vLLM calls it with (logits, generators, k, p)."""
        return self.runner.sampler.topk_topp_sampler

    @draw.setter
    def draw(self, module: Any) -> None:
        self.runner.sampler.topk_topp_sampler = module

    def rows(self, count: int) -> list[Row]:
        """Return the requests of the first `count` rows of logits; none while vLLM warms up."""
        states = [(i, self.runner.requests[i]) for i in self.runner.input_batch.req_ids[:count]]
        return [Row(i, state.sampling_params, len(state.output_token_ids)) for i, state in states]

    def failed(self, count: int) -> Tensor | None:
        """Return bool [count]: True for each of this step's first `count` requests with a NaN score in this rank."""
        state = live_state()
        return None if state is None else state.failed_rows(count)

    def routes(self, count: int) -> tuple[np.ndarray, np.ndarray, Tensor] | None:
        """Return the last three arguments of `RunRecord.route` for this step's `count` requests; None if no experts
        are captured.
        """
        if self.experts is None:
            return None
        ends = self.runner.query_start_loc.np[: count + 1]
        first = self.runner.input_batch.num_computed_tokens_cpu[:count]
        return first, np.diff(ends), self.experts[: int(ends[-1])]

    def capture(self) -> None:
        """Let the routers of the model record their choices in `experts`, the experts that the tokens of a step take,
        int16 [tokens, layers, K], -1 in layers without experts, at an address into which a CUDA graph can write.

        Call this before vLLM compiles the model or captures CUDA graphs. On a GPU, fused kernels that choose experts
        themselves would not be recorded; `moe_backend: triton` (arguments.py) excludes them.
        """
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        layers = [module for module in self.model.modules() if isinstance(module, MoERunner)]
        if not layers:
            return
        config = self.runner.vllm_config
        model, tokens = config.model_config, config.scheduler_config.max_num_batched_tokens
        sizes = tokens, model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        self.experts = captured = torch.full(sizes, -1, dtype=torch.int16, device=self.runner.device)

        def take(layer: int, experts: Tensor) -> None:
            captured[: len(experts), layer] = experts.to(torch.int16)

        for module in layers:
            module.router.set_capture_fn(partial(take, module.layer_id))


class CheckedSampler(Sampler):
    """vLLM's sampler, with NOT_FINITE in place of the tokens of requests whose log-probs are not finite."""

    def __init__(self, runner: Runner) -> None:
        stock = runner.runner.sampler
        super().__init__(stock.logprobs_mode, stock.use_fp64_gumbel)
        self.rows = runner.rows
        self.topk_topp_sampler = SeededSampler(runner, stock.topk_topp_sampler)  # type: ignore[assignment]

    def forward(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        failed = not_finite(logits) if self.rows(1) else None  # first, because vLLM writes into the logits
        output = super().forward(logits, *args, **kwargs)
        if failed is not None:
            output.sampled_token_ids.masked_fill_(failed[:, None], NOT_FINITE)
        return output


def not_finite(logits: Tensor) -> Tensor:
    """Return bool [B]: True for a request whose logits [B, V] have NaN or +inf, or with a NaN score of the policy. A
    grammar has written -inf for what it forbids, which may be everything.
    """
    failed = ~(logits.amax(-1) < torch.inf)
    state = live_state()
    return failed if state is None else failed | state.failed_rows(len(logits))
