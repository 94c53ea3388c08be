"""Makes a server sample requests that have a seed as a rollout does, with samplers.SeededSampler in the workers.

As for rollouts (rollout/requests.py), a sequence's seed is computed from the request's seed, the prompt and the sample
index. Only the server's process has all three. It puts the sequence's seed into `extra_args`, and removes the request's
seed. Otherwise vLLM would make a generator for sample i, seeded with the request's seed + i. That generator would also
crash the engine on a CPU: vLLM resets a generator's offset between two chunks of a prompt, and a CPU's has no offset.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from rollout.requests import sequence_seed
from rollout.vllm.compat.arguments import KEY


def draw_seeded_requests() -> None:
    """In a worker, wrap vLLM's sampler in SeededSampler."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from rollout.vllm.samplers import SeededSampler

    init: Any = GPUModelRunner.__init__

    @wraps(init)
    def init_with_sampler(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if KEY in (self.vllm_config.additional_config or {}):
            self.sampler.topk_topp_sampler = SeededSampler(self, self.sampler.topk_topp_sampler)

    GPUModelRunner.__init__ = init_with_sampler  # type: ignore[method-assign]


def give_sequences_their_seeds() -> None:
    """In the server, give each sequence its own seed. vLLM adds the samples of a request one by one."""
    from vllm.v1.engine.output_processor import OutputProcessor

    add: Any = OutputProcessor.add_request

    @wraps(add)
    def seed_and_add(
        self: Any, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        params = request.sampling_params
        if params is not None and params.seed is not None and params.temperature > 0:
            seed = params.seed if parent_req is None else parent_req.sampling_params.seed
            own_seed = sequence_seed(seed, request.prompt_token_ids or (), request_index)
            params.extra_args, params.seed = {**(params.extra_args or {}), KEY: {"seed": own_seed}}, None
        add(self, request, prompt, parent_req, request_index, queue)

    OutputProcessor.add_request = seed_and_add  # type: ignore[method-assign]
