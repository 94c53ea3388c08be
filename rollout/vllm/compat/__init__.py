"""rollout.vllm.compat: all code that depends on vLLM's version, or on the platform on which vLLM runs.

arguments.py  the supported version, and vLLM's engine arguments for a cache policy
plugin.py     registration of our parts with vLLM, and replacement of some of vLLM's
finite.py     failure of a request whose log-probs are not finite
seeds.py      sampling of a server's requests that have a seed, as in a rollout
models.py     corrections to vLLM's model code
experts.py    the record of the experts that tokens take, and the experts' arithmetic on a CPU
refusals.py   errors for vLLM settings that would break eviction or its record
paged.py      memory layout of a layer's cache, and other data that a worker reads from vLLM
processes.py  ends vLLM's processes when the process that started them ends
server.py     vLLM's OpenAI server;  clients.py  requests that the server refuses;  access.py  clients that may use it

Tested on vLLM's CPU build; the CUDA parts were written from the source of vLLM 0.31, and have not been run.
docs/internals.md lists every private name of vLLM that we use, and tests/vllm_engine/test_vllm_surface.py checks them.
"""
