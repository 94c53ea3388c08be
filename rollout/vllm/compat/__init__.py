"""rollout.vllm.compat: all code that depends on vLLM's version, or on the platform on which vLLM runs.

Tested on vLLM's CPU build; the CUDA parts were written from the source of vLLM 0.32, and have not been run.
docs/internals.md lists every private name of vLLM that we use, and tests/vllm_engine/test_vllm_surface.py checks them.
"""
