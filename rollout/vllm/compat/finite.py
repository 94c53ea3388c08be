"""A request whose log-probs are not finite fails in the step in which it would draw; the others go on.

worker     finds such rows before anything is drawn, and puts NOT_FINITE in the place of their tokens. That travels with
           all other tokens, so that no step waits for the device because of it.
scheduler  ends a request that gets it, as vLLM ends one that has failed: finish_reason "error", stop_reason REASON.
           What had it before this step stays as it is.

Who asked then says so: the engine with NotFiniteError (engine.py), the server with status 500 (server.py).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor

from rollout.vllm.compat.arguments import KEY
from rollout.vllm.compat.paged import live_state

NOT_FINITE = -1  # no token
REASON = "not finite"


def refuse_what_is_not_finite() -> None:
    """Replace what draws in vLLM's V1 runner, and what its scheduler makes of it. Engines that are not ours stay."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample_tokens: Any = GPUModelRunner.sample_tokens
    sample, update = GPUModelRunner._sample, Scheduler._update_request_with_output

    @wraps(sample_tokens)
    def look_and_sample_tokens(self: Any, grammar_output: Any) -> Any:
        """Look at the logits as the model gave them: a grammar then writes -inf into them."""
        state = self.execute_model_state
        ours = KEY in (self.vllm_config.additional_config or {})
        self.not_finite = not_finite(state.logits) if ours and state is not None and state.logits is not None else None
        return sample_tokens(self, grammar_output)

    @wraps(sample)
    def sample_or_mark(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        if self.not_finite is not None:
            output.sampled_token_ids.masked_fill_(self.not_finite[:, None], NOT_FINITE)
        return output

    @wraps(update)
    def update_or_fail(self: Any, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        if NOT_FINITE not in new_token_ids:
            return update(self, request, new_token_ids, *args, **kwargs)
        request.status, request.stop_reason, request.resumable = RequestStatus.FINISHED_ERROR, REASON, False
        return [], True

    GPUModelRunner.sample_tokens = look_and_sample_tokens  # type: ignore[assignment, method-assign]
    GPUModelRunner._sample = sample_or_mark  # type: ignore[method-assign]
    Scheduler._update_request_with_output = update_or_fail  # type: ignore[method-assign]


def not_finite(logits: Tensor) -> Tensor:
    """Which rows of logits [B, V] give no log-probs, or have failed in the forward: bool [B].

    A maximum passes NaN on. +inf gives NaN, and so does a row of nothing but -inf; -inf among others is a probability
    of 0.
    """
    failed = ~logits.amax(-1).isfinite()
    state = live_state()
    return failed if state is None else failed | state.failed_rows(len(logits))
