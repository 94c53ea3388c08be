"""Observe vLLM's scheduler while an in-process engine samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Watched:
    """For each scheduled step, the numbers of running requests, used blocks and fed tokens; and all preemptions."""

    running: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    preempted: int = 0


def scheduler_of(engine: Any) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def pool_of(engine: Any) -> Any:
    return scheduler_of(engine).kv_cache_manager.block_pool


@contextmanager
def watched(engine: Any) -> Iterator[Watched]:
    scheduler, pool, records = scheduler_of(engine), pool_of(engine), Watched()
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def schedule_and_look(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        records.running.append(len(scheduler.running))
        records.fed.append(output.total_num_scheduled_tokens)
        # one block less than the pool has: the null block belongs to no request
        records.used.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        return output

    def preempt_and_count(*args: Any, **kwargs: Any) -> Any:
        records.preempted += 1
        return preempt(*args, **kwargs)

    scheduler.schedule, scheduler._preempt_request = schedule_and_look, preempt_and_count
    try:
        yield records
    finally:
        del scheduler.schedule, scheduler._preempt_request
