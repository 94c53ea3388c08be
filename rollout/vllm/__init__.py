"""rollout.vllm: a plugin that makes stock vLLM 0.31 sample with eviction. It is no fork, and patches no files of vLLM.

engine.py     VLLMEngine, the Engine of rollout/engine.py
serve.py      `sparse-rl serve`: `vllm serve` under the policy that the model was trained with

messages.py   the messages that vLLM's scheduler sends to its workers with every step
beside.py     bytes that a worker holds in addition to the cache, subtracted from the GPU share that vLLM plans with
spec.py       scheduler side: the number of blocks that a sequence owns; blocks that eviction frees return to the pool
connector.py  tells the workers which requests begin, end, or are to be compacted
state.py      worker side: positions and policy state stored next to the paged cache, and the compaction itself
plan.py       slots and entries of a forward pass, which are the same for all layers
slabs.py      the caches of all layers as one tensor
arrivals.py   worker side under a learned policy, which evicts one token for each new one, before the layer attends
backend.py    the attention backend, which gets physical lengths and slots, and passes the queries to the policy; the
              base of backend_cpu.py and backend_cuda.py
exact.py      attention in float32 on a CPU, as the trainer computes it
worker.py     vLLM's worker, with the methods that the engine calls, and a cache no larger than all sequences can fill
samplers.py   the samplers of a worker: for a rollout's sequences, and for a server's requests that have a seed
handover.py   weights for an engine that runs in separate processes
record.py     the evictions and log-probs that a worker records during a run, and returns to the engine after it
compat/       everything that depends on vLLM's version or on the platform

The worker identifies a request by its first cache block, which only this request owns, from its admission to its end,
because requests share no prefix. A request's physical length, the number of entries that it holds, is a pure function
of (prompt length, number of tokens). So scheduler and worker each compute it.
"""

from __future__ import annotations


def register() -> None:
    """Install the plugin. vLLM calls this entry point (`vllm.general_plugins`) in each of its processes.

    The plugin has no effect on an engine without a policy of ours.
    """
    from rollout.vllm.compat import plugin, processes

    processes.end_with_parent()
    plugin.register()
