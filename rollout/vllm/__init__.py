"""rollout.vllm: stock vLLM 0.31 with eviction active, as a plugin. No fork, no patched files.

engine.py     VLLMEngine, the Engine of rollout/engine.py
serve.py      `sparse-rl serve`: vllm serve with the same policy

messages.py   what vLLM's scheduler tells its workers with every step
beside.py     what a worker holds beside the cache, taken off the share of a GPU that vLLM plans with
spec.py       scheduler side: how many blocks a sequence owns; what eviction frees goes back to the pool
connector.py  from scheduler to workers: who begins, who ends, and who is due to compact
state.py      worker side: positions and policy state beside the paged cache, and the compaction itself
plan.py       what one forward does to every layer alike;  slabs.py  the caches of all layers, as one
arrivals.py   that of a learned policy, which decides before a layer attends: one token comes, and one goes, per kv head
backend.py    the attention backend: physical lengths and slots in, queries out; on backend_cpu.py, backend_cuda.py
exact.py      attention in float32 on a CPU, as the trainer computes it
worker.py     vLLM's worker, with what the engine calls on it, and a cache no larger than all its sequences can fill
samplers.py   what draws in a worker: a rollout's sequences, and a server's requests that bring a seed
handover.py   weights for an engine in processes of its own
record.py     what a worker writes down of a run, and hands to the engine once it is over: evictions and log-probs
compat/       everything that depends on vLLM's version or on the platform

A request is known to the worker by its first cache block, which is its own from admission to its end: no prefix is
shared. Its physical length is a pure function of (prompt length, tokens), so scheduler and worker each compute it.
"""

from __future__ import annotations


def register() -> None:
    """Entry point `vllm.general_plugins`: called in each of vLLM's processes. Inert where no policy is set."""
    from rollout.vllm.compat import plugin, processes

    processes.end_with_parent()
    plugin.register()
