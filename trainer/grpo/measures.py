"""Records metrics of rollouts and batches over all processes, in addition to TRL's. panel.py has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from rollout.engine import Rollout
from sparse_rl.attention.families import policy_shape
from sparse_rl.models.base import base_of
from trainer.grpo.panel import cache_sums, over_processes, policy_panel, replay_panel
from trainer.grpo.rows import Learned


class Measures:
    """Records metrics for a trainer, in the trainer's current mode (train or eval), and applies the replay guard.

    gaps : mode -> a tensor for each batch since the last log, float [2, tokens], with the arguments `gap` and `ratio`
        of panel.replay_panel
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.gaps: dict[str, list[Tensor]] = {"train": [], "eval": []}

    def batch(self, batch: dict[str, Any], scored: Tensor) -> None:
        """Add a batch to the mismatch panel, and apply the replay guard to it.

        Call this before the weights are updated for the first time since the batch was sampled.

        batch : TRL's batch
        scored : the trainer's log-probs of the completion tokens, float [rows, completion width]
        """
        trainer, accelerator = self.trainer, self.trainer.accelerator
        real = batch["completion_mask"].bool()
        gap = (scored - batch["model_per_token_logps"])[real]
        ratio = (scored - batch["sampling_per_token_logps"])[real]
        local = torch.stack([gap, ratio, torch.ones_like(gap)]).float()
        gathered = accelerator.gather(accelerator.pad_across_processes(local, dim=1)[None])
        gathered = gathered.transpose(0, 1).reshape(3, -1).cpu()
        pair = gathered[:2, gathered[2] > 0]
        self.gaps[trainer.mode].append(pair)
        if trainer.args.sparse.train_attention == "replay":
            trainer.probed_engine.check(pair[0])

    def rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Record the final retention of the sequences, their peak cache bytes, and the bytes of a full cache.

        Layers with a sliding window are not counted.
        """
        trainer, accelerator = self.trainer, self.trainer.accelerator
        layers, kv_heads, head_dim = policy_shape(base_of(accelerator.unwrap_model(trainer.model)).config)
        per_entry = 2 * layers * kv_heads * head_dim * (2 if trainer.args.bf16 or trainer.args.fp16 else 4)
        local = torch.tensor([cache_sums(rollouts, trainer.engine.policy)], device=accelerator.device)
        retention, held, fed, count, tokens = accelerator.gather(local).double().sum(0).tolist()
        self._note("cache/retention", retention / count)
        self._note("cache/bytes_held", held * per_entry)
        self._note("cache/bytes_full", fed * per_entry)
        if trainer.mode == "train":
            trainer.clock.tokens += int(tokens)
        self.policy(max(rollouts, key=lambda r: len(r.trace)))

    def policy(self, rollout: Rollout) -> None:
        """Record the metrics that only some policies have (panel.policy_panel), for one sequence of each process."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        with accelerator.autocast():
            panel = policy_panel(base_of(accelerator.unwrap_model(trainer.model)), trainer.engine.policy, rollout)
        for name, value in over_processes(gather_object([panel])).items():
            self._note(name, value)

    def learned(self, learned: Learned) -> None:
        """Record the scorers' boundary loss (or the loss of another method) and the recall.

        The recall is the kept share of the tokens that the training target of the scorers would keep.
        """
        held, total = (sum(float(pair[i]) for pair in learned.recalls.values()) for i in (0, 1))
        accelerator = self.trainer.accelerator
        local = torch.tensor([[float(learned.losses.detach().mean()), held, total]], device=accelerator.device)
        loss, held, total = accelerator.gather(local).mean(0).tolist()
        self._note("method_loss" if self.trainer.args.scorers is None else "boundary_loss", loss)
        if total:  # else the target keeps no token on any process
            self._note("cache/recall", held / total)

    def _note(self, name: str, value: float) -> None:
        self.trainer._metrics[self.trainer.mode][name].append(value)

    def read(self) -> dict[str, float]:
        """Return the mismatch panel over the batches since the last log, for the trainer's current mode."""
        mode = self.trainer.mode
        if not (gaps := self.gaps[mode]):
            return {}
        gap, ratio = torch.cat(gaps, dim=1)
        gaps.clear()
        prefix = "" if mode == "train" else "eval_"
        panel = replay_panel(gap, ratio, self.trainer.args.sparse.importance_clip)
        return {prefix + name: value for name, value in panel.items()}
