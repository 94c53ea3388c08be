"""rollout.vllm.compat: all code that depends on vLLM's version, or on the platform that it runs on.

arguments.py  the supported version, and vLLM's engine arguments for a cache policy
plugin.py     registration of our parts with vLLM, and replacement of some of vLLM's
finite.py     failure of a request whose log-probs are not finite
seeds.py      sampling of a server's requests that have a seed, as in a rollout
refusals.py   errors for vLLM settings that would break eviction or its record
paged.py      memory layout of a layer's cache, and other data that a worker reads from vLLM
processes.py  end of the processes that vLLM starts, together with ours
server.py     vLLM's OpenAI server;  clients.py  requests that it refuses;  access.py  clients that may use it

Written from the source of vLLM 0.31, and tested on its CPU build. The CUDA parts have not been run.
docs/internals.md lists every private name of vLLM that we use, and tests/vllm_engine/test_vllm_surface.py checks them.
"""
