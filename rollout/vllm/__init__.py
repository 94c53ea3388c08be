"""rollout.vllm: a plugin that makes stock vLLM 0.32 sample with eviction (docs/architecture.md).

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
