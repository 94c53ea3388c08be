"""rollout.vllm.compat: all that depends on vLLM's version, or on the platform that it runs on.

arguments.py  the supported version, and vLLM's engine arguments for a cache policy
plugin.py     what is registered with vLLM, and replaced in it
finite.py     what becomes of a request whose log-probs are not finite
seeds.py      a server's requests with a seed are drawn as a rollout's sequences are
refusals.py   what vLLM can do that would break eviction or its record
paged.py      how a layer's cache lies in memory, and what else a worker reads of vLLM
processes.py  the processes that vLLM starts, which end with ours
server.py     vLLM's OpenAI server;  clients.py  what it refuses its clients;  access.py  who may use it

Read from, and tested on, vLLM 0.31 (its CPU build). The CUDA facts are read from its source and have not been run.
docs/internals.md lists every private name of vLLM that we use, and tests/vllm_engine/test_vllm_surface.py holds it.
"""
