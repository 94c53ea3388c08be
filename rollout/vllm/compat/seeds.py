"""A server's requests with a seed draw what a rollout's sequence draws: by samplers.SeededSampler, in the workers.

The seed of a sequence is made from (the request's seed, prompt, sample index), as everywhere (rollout/requests.py). The
server's process, which alone knows all three, puts it into the request's `extra_args`, and takes the request's own seed
away: vLLM would make a generator of it, and give sample i the seed + i. Where vLLM throws a token away, between two
chunks of a prompt, it also sets the generator's offset back: a CPU's has none, and the engine would crash.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from rollout.requests import sequence_seed
from rollout.vllm.compat.arguments import KEY


def draw_seeded_requests() -> None:
    """In a worker: put our sampler before vLLM's, which goes on to draw all requests without a seed of ours."""
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
    """In the server: each sequence of a request passes here, the samples of n > 1 one by one."""
    from vllm.v1.engine.output_processor import OutputProcessor

    add: Any = OutputProcessor.add_request

    @wraps(add)
    def seed_and_add(
        self: Any, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        own = request.sampling_params
        if own is not None and own.seed is not None and own.temperature > 0:
            seed = own.seed if parent_req is None else parent_req.sampling_params.seed
            drawn = sequence_seed(seed, request.prompt_token_ids or (), request_index)
            own.extra_args, own.seed = {**(own.extra_args or {}), KEY: {"seed": drawn}}, None
        add(self, request, prompt, parent_req, request_index, queue)

    OutputProcessor.add_request = seed_and_add  # type: ignore[method-assign]
