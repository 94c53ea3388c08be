"""One step ahead (`rollout.ahead: 1`): servers sample the next generation while the present one trains.

It is asked for right after the engine has received the weights of an update, and before that update, so it is trained
one update behind the weights that sampled it, never more. Its prompts are those that the training's sampler will hand
out; a seed belongs to each generation, so the same rollouts come wherever and whenever they are sampled.

The engine has two methods more than others (rollout/servers.py): `begin` takes what `generate` takes, and returns at
once a batch, whose `done` maps places to the rollouts that have come; `finish` waits for what `generate` returns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from accelerate.utils import gather_object

from rollout.engine import Rollout
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.errors import StoppedError
from trainer.grpo.metrics import check_gap
from trainer.grpo.turns import trace_of_state, trace_state

EARLY_ROWS = 4  # maximum number of rows that are scored before the update


@dataclass
class NextGeneration:
    """A generation that was asked for.

    prompts : token ids of each row's prompt
    step : step whose weights sample it
    batch : what the engine's `begin` has returned; None once it is finished
    rollouts : the rollouts, once it is finished
    """

    prompts: list[list[int]]
    step: int
    batch: Any = None
    rollouts: list[Rollout] = field(default_factory=list)


class Ahead:
    """Asks a trainer's engine for the next generation, and hands it out when it is due.

    coming : the next generation; None before it is asked for
    behind : number of updates between the weights that sampled the present generation, and those that it trains
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.coming: NextGeneration | None = None
        self.behind = 0

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of each process between two generations."""
        return self.trainer.args.steps_per_generation * self.trainer.num_iterations

    def begin(self, rows: list[int]) -> None:
        """Ask for the next generation, of these rows. The engine has the present weights."""
        trainer = self.trainer
        texts = (trainer.train_dataset[row]["prompt"] for row in rows)
        prompts = [prompt_ids(text, trainer.processing_class, trainer.thinking) for text in texts]
        sampling = dataclasses.replace(trainer.sampling, seed=trainer.sampling_seed(trainer.generations + 1))
        self.coming = NextGeneration(prompts, trainer.state.global_step, trainer.engine.begin(prompts, sampling))

    def rows_due(self, micro_batch: int) -> list[int]:
        """Return the dataset's rows of this process in the next generation, if the last update before it begins with
        this micro-batch; else, or if the training ends before it, [].
        """
        trainer, args, length = self.trainer, self.trainer.args, self.micro_batches
        if micro_batch % length != max(0, length - args.gradient_accumulation_steps):
            return []
        sampler = trainer._get_train_sampler()
        of_epoch = len(sampler) // args.generation_batch_size
        epoch, before = divmod(trainer.generations * length, of_epoch)
        updates = -(-of_epoch // args.gradient_accumulation_steps)
        if epoch * updates + before // args.gradient_accumulation_steps >= trainer.state.max_steps:
            return []
        sampler.set_epoch(epoch)
        own = args.generation_batch_size // trainer.accelerator.num_processes
        start = before * args.generation_batch_size + trainer.accelerator.process_index * own
        return list(islice(sampler, start, start + own))

    def settle(self) -> None:
        """Wait for what this process has asked for: only then may the engine get other weights, or sample other rows.
        Processes wait for one another in `ServerEngine.load_weights`."""
        if (coming := self.coming) is not None and coming.batch is not None:
            coming.rollouts, coming.batch = self.trainer.engine.finish(coming.batch), None

    def take(self, prompts: list[list[int]]) -> list[Rollout]:
        """Return the rollouts that were asked for, or [] if none were. prompts : the token ids of the rows that are due

        Raises StoppedError if the rollouts are not those of these rows.
        """
        self.settle()
        coming, self.coming, self.behind = self.coming, None, 0
        if coming is None:
            return []
        for row, (due, asked, came) in enumerate(zip(prompts, coming.prompts, coming.rollouts, strict=True)):
            if not due == asked == came.prompt_ids:
                wrong = "was asked for another prompt" if due != asked else "came for another prompt"
                mend = "Nothing was trained on this batch; the last checkpoint is untouched"
                raise StoppedError(f"rollout.ahead: the rollout of row {row} {wrong} than the one that is due. {mend}")
        self.behind = self.trainer.state.global_step - coming.step
        self.trainer._metrics["train"]["sync/behind"].append(float(self.behind))
        return coming.rollouts

    def check_early(self) -> None:
        """Apply the replay guard to a few rows of the next generation that have come before the update.

        Until the update the trainer has the weights that sample them, so their gap is rounding. When the turn of the
        generation has come, its gap contains what the update has changed, and says nothing about errors.
        """
        trainer, coming = self.trainer, self.coming
        early: list[Rollout] = []
        if coming is not None and coming.step == trainer.state.global_step:
            came = coming.rollouts if coming.batch is None else [*dict(coming.batch.done).values()]
            early = came[:EARLY_ROWS]
        if trainer.args.sparse.train_attention != "replay" or not all(gather_object([bool(early)])):
            return
        gap = trainer.weight_sync.gap(early).abs().mean()
        largest = float(trainer.accelerator.gather(gap.to(trainer.accelerator.device)).max())
        trainer._metrics["train"]["sync/early_gap"].append(largest)
        if trainer.weight_sync.guard.enabled:
            check_gap("replay gap", largest, trainer.weight_sync.limit)

    def state(self) -> dict[str, Any]:
        """Wait for what was asked for, and return it as plain data and tensors; {} if nothing was."""
        self.settle()
        if self.coming is None:
            return {}
        rows = [{**vars(rollout), "trace": trace_state(rollout.trace)} for rollout in self.coming.rollouts]
        return {"step": self.coming.step, "rows": rows}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` has returned."""
        if state:
            rollouts = [Rollout(**{**row, "trace": trace_of_state(row["trace"])}) for row in state["rows"]]
            self.coming = NextGeneration([r.prompt_ids for r in rollouts], state["step"], rollouts=rollouts)
