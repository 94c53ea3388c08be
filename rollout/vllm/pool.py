"""vLLM's worker, with a cache no larger than all sequences together can fill.

vLLM gives the cache what its share of a GPU leaves, or what it is told; under a budget that may be many times as much.
"""

from __future__ import annotations

from rollout.vllm.compat.arguments import on_cpu

if on_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]


class BoundedWorker(Worker):
    """That of this platform, CPU or GPU."""

    def determine_available_memory(self) -> int:
        """Bytes for this worker's cache: every sequence at its longest, and a block that vLLM keeps for itself."""
        sequences = self.vllm_config.scheduler_config.max_num_seqs
        specs = self.get_kv_cache_spec().values()
        most = sum(sequences * spec.max_memory_usage_bytes(self.vllm_config) + spec.page_size_bytes for spec in specs)
        if (told := self.cache_config.kv_cache_memory_bytes) is not None:
            self.cache_config.kv_cache_memory_bytes = min(told, most)
        return min(super().determine_available_memory(), most)
