"""Reports the steps of a vLLM engine in this process to the running clock (sparse_rl/clock.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparse_rl.clock import Clock


@contextmanager
def observed(llm: Any) -> Iterator[None]:
    """Report each step of a `vllm.LLM` in this block."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    groups = scheduler.kv_cache_config.kv_cache_groups
    block_bytes = sum(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
    free = pool.get_num_free_blocks()
    plain_step, finished, reported = engine.step, 0, 0

    def step() -> Any:
        nonlocal finished, reported
        running = len(scheduler.running)
        outputs = plain_step()
        finished += sum(len(output.outputs[0].token_ids) for output in outputs if output.finished)
        unfinished = [*scheduler.running, *scheduler.waiting]
        sampled = finished + sum(request.num_output_tokens for request in unfinished)
        reads = any(request.num_computed_tokens < request.num_prompt_tokens for request in unfinished)
        if Clock.running is not None:
            at_once = max(running, len(scheduler.running))  # the first step starts sequences, the last one ends them
            used = free - pool.get_num_free_blocks()
            Clock.running.step(sampled - reported, used * block_bytes, at_once, prefilled=not reads)
        reported = sampled
        return outputs

    engine.step = step
    try:
        yield
    finally:
        del engine.step  # the attribute of the object, which hides the method
