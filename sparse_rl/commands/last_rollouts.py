"""Shows the last sampled completions, and pictures of their caches, in W&B and TensorBoard when training ends."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from rollout.engine import Rollout
from sparse_rl.analysis.heads import draw_evict_ratios, evict_ratios
from sparse_rl.analysis.kept_heads import draw_kept_heads, kept_heads
from sparse_rl.analysis.positions import compared_positions, draw_positions
from sparse_rl.commands.sources import token_texts
from sparse_rl.errors import UserError, one_line
from sparse_rl.policies.registry import fingerprint
from sparse_rl.temporary import temporary_folder
from trainer.grpo.rows import Sampled

logger = logging.getLogger("sparse_rl")
TABLE, MAPS = "last_completions", "cache/{name}"  # names in W&B and TensorBoard
MOST_ROWS = 64


def table(sampled: Sampled, rewards: Sequence[str], tokenizer: Any) -> tuple[list[str], list[list[Any]]]:
    """Return the names of the columns, and at most MOST_ROWS rows. rewards : names of the reward functions"""
    columns = ["prompt", "completion", "tokens", "ended_by", "retention", *rewards, "advantage"]
    rows = []
    for rollout, of_rewards, advantage in zip(sampled.rollouts, sampled.rewards, sampled.advantages, strict=True):
        texts = [tokenizer.decode(ids) for ids in (rollout.prompt_ids, rollout.completion_ids)]
        retention = round(rollout.trace.retention(), 4)
        about = [len(rollout.completion_ids), rollout.finish_reason, retention]
        rows.append([*texts, *about, *of_rewards, advantage])
    return columns, rows[:MOST_ROWS]


def draw_maps(rollouts: Sequence[Rollout], named: Mapping[str, str], tokenizer: Any, folder: Path) -> list[Path]:
    """Draw the analyses that need no model, and return the pictures; an analysis without numbers is left out.

    named : the model and the fingerprint of the policy, for titles
    """
    traces = [rollout.trace for rollout in rollouts]
    number, longest = max(enumerate(rollouts, start=1), key=lambda numbered: len(numbered[1].trace))
    ids = longest.prompt_ids + longest.completion_ids
    strings = partial(token_texts, tokenizer)
    analyses = {
        "evict_ratio": (lambda: evict_ratios(traces, named), draw_evict_ratios),
        "kept_heads": (lambda: kept_heads(longest.trace, ids, named, strings, number), draw_kept_heads),
        "positions": (lambda: compared_positions([("last rollouts", named, traces)]), draw_positions),
    }
    files = []
    for name, (numbers_of, draw) in analyses.items():
        try:
            numbers = numbers_of()
        except UserError:  # no token could have been evicted
            continue
        draw(numbers, folder / f"{name}.png")
        files.append(folder / f"{name}.png")
    return files


class LastRollouts(TrainerCallback):
    """Writes the table and the pictures of the first process when training ends. If this fails, it only warns.

    trainer : the SparseGRPOTrainer;  model : name of the model, for titles
    """

    trainer: Any = None

    def __init__(self, model: str) -> None:
        self.model = model

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reports = [show for name, show in REPORTS.items() if name in args.report_to]
        if not state.is_world_process_zero or self.trainer.last_sampled is None or not reports:
            return
        try:
            self._show(reports)
        except Exception as error:
            logger.warning("the table of the last completions was not logged: %s", one_line(error, 300))

    def _show(self, reports: Sequence[Callable[..., None]]) -> None:
        trainer, sampled = self.trainer, self.trainer.last_sampled
        policy, tokenizer = trainer.engine.policy, trainer.processing_class
        columns, rows = table(sampled, trainer.reward_func_names, tokenizer)
        named = {"model": self.model, "policy": fingerprint(policy)}
        with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
            maps = draw_maps(sampled.rollouts, named, tokenizer, Path(folder)) if policy.schedule.evicts else []
            for show in reports:
                show(trainer, columns, rows, maps)


def in_wandb(trainer: Any, columns: Sequence[str], rows: Sequence[Sequence[Any]], maps: Sequence[Path]) -> None:
    import wandb

    if wandb.run is None:  # W&B could not start
        return
    pictures = {MAPS.format(name=file.stem): wandb.Image(str(file)) for file in maps}
    shown = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
    wandb.run.log({TABLE: shown, **pictures, "train/global_step": trainer.state.global_step})


def in_tensorboard(trainer: Any, columns: Sequence[str], rows: Sequence[Sequence[Any]], maps: Sequence[Path]) -> None:
    from matplotlib.pyplot import imread
    from torch.utils.tensorboard import SummaryWriter

    def line(cells: Sequence[Any]) -> str:
        texts = (str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    (scalars,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, TensorBoardCallback))
    step = trainer.state.global_step
    with SummaryWriter(scalars.logging_dir) as writer:  # the callback has closed its own writer
        writer.add_text(TABLE, "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)]), step)
        for file in maps:
            writer.add_image(MAPS.format(name=file.stem), imread(file)[..., :3], step, dataformats="HWC")


REPORTS: dict[str, Callable[..., None]] = {"wandb": in_wandb, "tensorboard": in_tensorboard}  # name in report_to
