"""The adapter of vLLM's V2 model runner, as runner.py is that of V1.

V2 samples before the step's compactions, so a NaN score ends a request one step later than in V1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.worker.gpu.sample.sampler import Sampler

from rollout.vllm.compat import runner as v1
from rollout.vllm.compat.runner import Row
from rollout.vllm.sampling import NOT_FINITE, SeededSampler
from sparse_rl.errors import UserError


class RunnerV2(v1.Runner):
    def __init__(self, runner: Any) -> None:
        if type(runner.sampler) is not Sampler:
            raise UserError(f"vLLM's {type(runner.sampler).__name__} excludes our sampler; leave its option out")
        super().__init__(runner)
        postprocess = runner.postprocess_sampled  # it counts tokens for penalties, and NOT_FINITE is no index

        def postprocess_tokens(index: Tensor, tokens: Tensor, *args: Any) -> None:
            postprocess(index, tokens.clamp(min=0), *args)

        runner.postprocess_sampled = postprocess_tokens

    def sampler(self) -> Any:
        return CheckedSamplerV2(self)

    def rows(self, count: int) -> list[Row]:
        batch, states = self.runner.sampler.batch, self.runner.req_states
        if batch.req_ids[0] not in states.req_id_to_index:  # vLLM warms up
            return []
        index = batch.idx_mapping_np[:count]
        seen = batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count]
        steps = np.maximum(seen - states.prompt_len.np[index], 0).tolist()
        parameters = [self.runner.sampler.parameters[i] for i in index.tolist()]
        return [Row(*row) for row in zip(batch.req_ids[:count], parameters, steps, strict=True)]

    def routes(self, count: int) -> tuple[np.ndarray, np.ndarray, Tensor] | None:
        if self.experts is None:
            return None
        batch = self.runner.sampler.batch
        counts = batch.num_scheduled_tokens[:count]
        return batch.num_computed_tokens_np[:count], counts, self.experts[: int(counts.sum())]


class CheckedSamplerV2(Sampler):
    def __init__(self, runner: RunnerV2) -> None:
        vars(self).update(vars(runner.runner.sampler))
        self.runner = runner
        self.batch: Any = None  # of this step
        self.parameters: dict[int, Any] = {}  # number of a request in the runner -> its SamplingParams
        self.topk_topp_sampler = SeededSampler(runner, self.plain)  # type: ignore[arg-type]

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_idx, sampling_params)
        self.parameters[req_idx] = sampling_params

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        self.batch = input_batch
        failed = v1.not_finite(logits) if self.runner.rows(1) else None
        output = super().__call__(logits, input_batch)
        if failed is not None:
            output.sampled_token_ids.masked_fill_(failed[:, None], NOT_FINITE)
        return output

    def _sample_random(self, processed_logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        self.arguments = args
        sampled, processed = self.topk_topp_sampler(processed_logits.float(), None, None, None)
        return sampled, processed_logits if processed is None else processed

    def plain(self, logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return super()._sample_random(logits, *self.arguments)
