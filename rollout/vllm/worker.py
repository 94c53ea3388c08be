"""What the engine calls on each of vLLM's workers, by name (`worker_extension_cls`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rollout.engine import SamplingConfig
from rollout.sampling import Uniforms, draw


class SequenceSampler(nn.Module):
    """The reference engine's sampler, where vLLM's own would apply top-k, top-p and its generators.

    So a sequence's tokens depend on its logits and its seed alone, on either engine, and the log-probs before the
    truncation are known too.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = runner
        self.begin(SamplingConfig(1))

    def begin(self, sampling: SamplingConfig) -> None:
        self.sampling = sampling
        self.streams: dict[int, Uniforms] = {}
        self.whole: list[tuple[list[str], torch.Tensor]] = []

    def forward(self, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [B, V] at the sampling temperature. Returns tokens int64 [B], and what they were drawn from [B, V]."""
        ids = list(self.runner.input_batch.req_ids)[: len(logits)]
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        uniform = torch.tensor([self._uniform(i) for i in ids], dtype=torch.float64, device=logits.device)
        tokens, processed = draw(logprobs, self.sampling, uniform)
        if self.sampling.truncated_support:
            self.whole.append((ids, logprobs.gather(-1, tokens[:, None])[:, 0].cpu()))
        return tokens, processed

    def _uniform(self, request_id: str) -> float:
        request = self.runner.requests[request_id]
        seed = request.sampling_params.extra_args["seed"]
        if seed not in self.streams:
            self.streams[seed] = Uniforms(seed)
        return self.streams[seed].at(len(request.output_token_ids))


class WorkerExtension:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def begin_sampling(self, sampling: dict[str, Any]) -> None:
        """The SamplingConfig of the requests that follow."""
        sampler = self.model_runner.sampler
        if not isinstance(sampler.topk_topp_sampler, SequenceSampler):
            sampler.topk_topp_sampler = SequenceSampler(self.model_runner)
        sampler.topk_topp_sampler.begin(SamplingConfig(**sampling))

    def whole_logprobs(self) -> dict[str, list[float]]:
        """Request -> its log-probs before top-k and top-p; draws of an unfinished prefill, void, come first."""
        found: dict[str, list[float]] = {}
        for request_ids, values in self.model_runner.sampler.topk_topp_sampler.whole:
            for request_id, value in zip(request_ids, values.tolist(), strict=True):
                found.setdefault(request_id, []).append(value)
        return found

    def replace_weights(self, source: str | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights by checkpoint name, from an iterable or a safetensors file."""
        if isinstance(source, str):
            from safetensors.torch import load_file

            source = load_file(source).items()
        with torch.no_grad():
            self.model_runner.model.load_weights((name, tensor.detach()) for name, tensor in source)

    def cache_facts(self) -> dict[str, int]:
        """blocks: of the pool, the null block included; side_bytes: held beside the cache."""
        from rollout.vllm import compat

        state = compat.live_state()
        blocks = self.model_runner.kv_cache_config.num_blocks
        return {"blocks": blocks, "side_bytes": 0 if state is None else state.side_bytes()}
