"""Ends a request whose log-probs are not finite, in the step that would sample from them. Other requests continue.

In place of a token sampled from such log-probs, a worker sends NOT_FINITE. The sampled tokens are copied from the
device in any case, so the check needs no further copy. The scheduler ends a request that receives NOT_FINITE with
finish_reason "error" and stop_reason REASON, and keeps the tokens of earlier steps. The engine then raises
NotFiniteError (engine.py); the server answers with status 500 (clients.py).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor

from rollout.vllm.compat.arguments import KEY
from rollout.vllm.compat.paged import live_state

NOT_FINITE = -1  # sent in place of a token; no token has this id
REASON = "not finite"


def refuse_what_is_not_finite() -> None:
    """Make vLLM's V1 runner and scheduler end requests whose log-probs are not finite, in engines of ours."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample_tokens: Any = GPUModelRunner.sample_tokens
    sample, update = GPUModelRunner._sample, Scheduler._update_request_with_output

    @wraps(sample_tokens)
    def look_and_sample_tokens(self: Any, grammar_output: Any) -> Any:
        """Check the model's logits before a grammar writes -inf into them."""
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
    """Return bool [B]: True for a request whose logits have NaN, +inf or only -inf, or with a NaN score of the policy.

    logits : [B, V]; a -inf among finite logits is valid, and means a probability of 0
    """
    failed = ~logits.amax(-1).isfinite()
    state = live_state()
    return failed if state is None else failed | state.failed_rows(len(logits))
