"""rollout.vllm: a plugin that makes stock vLLM 0.31 sample with eviction.

engine.py     VLLMEngine, the Engine of rollout/engine.py
serve.py      `sparse-rl serve`: `vllm serve` under the policy that the model was trained with

messages.py   the messages that vLLM's scheduler sends to its workers with every step
beside.py     the bytes that a worker holds in addition to vLLM's cache
spec.py       scheduler: the number of blocks that a sequence owns; blocks that eviction frees return to the pool
connector.py  tells the workers which requests begin, end, or are to be compacted
state.py      worker: positions and policy state stored next to the paged cache, and the compaction itself
compacting.py limits on the entries that one call compacts, and the bytes that the call takes
plan.py       slots and entries of a forward pass, which are the same for all layers
slabs.py      the caches of all layers as one tensor
arrivals.py   worker under a learned policy, which evicts one token for each new one, before the layer attends
contexts.py   requests that continue a compacted context; context_spec.py: their blocks; served_context.py: the context
              of a server
backend.py    the attention backend, which gets physical lengths and slots, and passes the queries to the policy; the
              base of backend_cpu.py and backend_cuda.py
folded.py     attention biases in kernels that do not support biases
exact.py      attention in float32 on a CPU, as the trainer computes it
worker.py     vLLM's worker, with the methods that the engine calls
samplers.py   the samplers of a worker: for a rollout's sequences, and for a server's requests that have a seed
handover.py   weights for an engine that runs in separate processes
record.py     the evictions and log-probs that a worker records during a run
compat/       everything that depends on vLLM's version or on the platform

A worker identifies a request by its first cache block, which no other request owns at the same time. A request's
physical length, the number of entries that it holds, depends only on the prompt's length and the number of tokens. So
scheduler and worker each compute it.
"""

from __future__ import annotations


def register() -> None:
    """Install the plugin. vLLM calls this entry point (`vllm.general_plugins`) in each of its processes.

    The plugin has no effect on an engine without a policy of ours.
    """
    from rollout.vllm.compat import plugin, processes

    processes.end_with_parent()
    plugin.register()
