"""What the engine calls on each of vLLM's workers, by name (`worker_extension_cls`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class WorkerExtension:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def replace_weights(self, source: str | Iterable[tuple[str, torch.Tensor]]) -> str | None:
        """Load weights by checkpoint name, from an iterable or a safetensors file. Returns what is wrong, or None."""
        if isinstance(source, str):
            from safetensors.torch import load_file

            source = load_file(source).items()
        model = self.model_runner.model
        try:
            with torch.no_grad():
                loaded = model.load_weights((name, tensor.detach()) for name, tensor in source)
        except (KeyError, ValueError, AssertionError) as error:
            return f"the engine cannot take the weights: {error}"
        missing = {name for name, _ in model.named_parameters()} - set(loaded)
        return f"weights were not handed over: {', '.join(sorted(missing)[:3])}" if missing else None

    def cache_facts(self) -> dict[str, int]:
        """blocks: of the pool, the null block included; side_bytes: held beside the cache."""
        from rollout.vllm import compat

        state = compat.live_state()
        blocks = self.model_runner.kv_cache_config.num_blocks
        return {"blocks": blocks, "side_bytes": 0 if state is None else state.side_bytes()}
