"""What a GRPO checkpoint holds beyond transformers' own: the rollout buffer with its traces, and the sampler's epoch.

Stock TRL loses both, so that a resumed run samples anew in the middle of a buffer and, in a later epoch, sees other
prompts. The state is written before transformers writes trainer_state.json, which marks a checkpoint as whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler

from sparse_rl.trace import EvictionTrace

STATE_FILE = "rollout_state_{rank}.pt"


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler with an order that is a function of (seed, epoch), so that a resume in a later epoch finds it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) + self.epoch)
        return super().__iter__()


def save_rollout_state(folder: Path, rank: int, state: dict[str, Any], buffer: list[dict[str, Any]] | None) -> None:
    """Write one rank's counters and, where it is not used up, its buffer of scored rollouts."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = None
    if buffer is not None:
        packed = [{**batch, "traces": [t.evict_at for t in batch["traces"]]} for batch in buffer]
    torch.save({**state, "buffer": packed}, folder / STATE_FILE.format(rank=rank))


def load_rollout_state(
    folder: Path, rank: int, device: torch.device
) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """What `save_rollout_state` wrote: (counters, buffer). Raises ValueError where the rank has no state."""
    file = folder / STATE_FILE.format(rank=rank)
    if not file.exists():
        raise ValueError(f"{folder} has no {file.name}: it was not written by this trainer with as many processes")
    state = torch.load(file, weights_only=True, map_location="cpu")
    packed = state.pop("buffer")
    if packed is None:
        return state, None
    buffer = []
    for batch in packed:
        tensors = {name: value.to(device) for name, value in batch.items() if name != "traces"}
        buffer.append({**tensors, "traces": [EvictionTrace(t) for t in batch["traces"]]})
    return state, buffer
