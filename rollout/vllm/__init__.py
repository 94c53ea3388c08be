"""rollout.vllm: stock vLLM 0.31 with eviction active, as a plugin. No fork, no patched files.

engine.py     VLLMEngine, the Engine of rollout/engine.py
serve.py      `sparse-rl serve`: vllm serve with the same policy

messages.py   the messages that vLLM's scheduler sends to its workers with every step
beside.py     bytes that a worker holds in addition to the cache, subtracted from the GPU share that vLLM plans with
spec.py       scheduler side: the number of blocks that a sequence owns; blocks that eviction frees return to the pool
connector.py  from scheduler to workers: requests that begin, requests that end, and requests that are due to compact
state.py      worker side: positions and policy state stored next to the paged cache, and the compaction itself
plan.py       the part of a forward pass that is the same for all layers;  slabs.py  the caches of all layers as one
arrivals.py   worker side under a learned policy, which evicts one token for each new one, before the layer attends
backend.py    the attention backend: physical lengths and slots in, queries out; used by backend_cpu.py, backend_cuda.py
exact.py      attention in float32 on a CPU, as the trainer computes it
worker.py     vLLM's worker, with the methods that the engine calls, and a cache no larger than all sequences can fill
samplers.py   the samplers of a worker: for a rollout's sequences, and for a server's requests that have a seed
handover.py   weights for an engine that runs in separate processes
record.py     the evictions and log-probs that a worker records during a run, and returns to the engine after it
compat/       everything that depends on vLLM's version or on the platform

The worker identifies a request by its first cache block, which the request owns from admission to its end: no prefix is
shared. Its physical length is a pure function of (prompt length, tokens), so scheduler and worker each compute it.
"""

from __future__ import annotations


def register() -> None:
    """Entry point `vllm.general_plugins`: called in each of vLLM's processes. Has no effect if no policy is set."""
    from rollout.vllm.compat import plugin, processes

    processes.end_with_parent()
    plugin.register()
