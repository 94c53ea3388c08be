"""Resumes a checkpoint on another number of processes, or at another ZeRO stage.

An update keeps its number of rows. A copy of the checkpoint is made for the new launch, and is removed when the run has
loaded it. What each process has of its own is merged and dealt out again: rows of GRPO's buffer so that each update
keeps its rows, those of its next generation in their order, and random states by turns. DeepSpeed's part becomes a
universal checkpoint, which DeepSpeed loads after three corrections (`_universal` and `settle`). Imports no large
packages at the top.
"""

from __future__ import annotations

import contextlib
import io
import math
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sparse_rl.errors import UserError
from sparse_rl.progress import say

KEYS = (  # the keys of a recipe that may change together
    *("launch.processes", "launch.zero_stage", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "steps_per_generation"),
)
STATE_FILE = "progress_{rank}.pt"  # our own state of each process
SPACE = 3  # bytes that a conversion needs at most, for each byte of the optimizer's state


@dataclass(frozen=True)
class Layout:
    """The processes of a training, and the rows of each.

    rows : rows of a micro-batch of one process
    accumulation, generation : micro-batches of an update, and of a generation of GRPO
    """

    processes: int
    zero_stage: int
    rows: int
    accumulation: int
    generation: int

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> Layout:
        rows, accumulation = recipe["per_device_train_batch_size"], recipe["gradient_accumulation_steps"]
        launch, generation = recipe["launch"], recipe.get("steps_per_generation") or accumulation
        return cls(launch["processes"], launch["zero_stage"], rows, accumulation, generation)

    def follows(self, then: Layout) -> bool:
        """Return True if the launch differs from that of `then`. Raise UserError if this cannot continue `then`."""
        if (self.processes, self.zero_stage) == (then.processes, then.zero_stage):
            return False
        if bool(self.zero_stage) != bool(then.zero_stage):
            wrong = f"was {then.zero_stage} and is now {self.zero_stage}: a run goes on with DeepSpeed, or without it"
            raise UserError(f"{wrong}, as it began. Set the old value, or start a new run", "launch.zero_stage")
        for name, kept, old, micro in (
            ("gradient_accumulation_steps", "an update", then.accumulation, self.accumulation),
            ("steps_per_generation", "a generation", then.generation, self.generation),
        ):
            whole = then.processes * then.rows * old
            if self.processes * self.rows * micro != whole:
                wrong = f"{kept} had {whole} rows, and has {self.processes * self.rows * micro} now"
                fit = f"set per_device_train_batch_size × {name} to {whole / self.processes:g}"
                fit = fit if whole % self.processes == 0 else f"choose launch.processes so that it divides {whole}"
                raise UserError(f"{wrong}; {fit}", "--resume")
        return True


def reshard(checkpoint: Path, place: Path, then: Layout, now: Layout) -> None:
    """Write a checkpoint of the layout `then` into the folder `place` for the layout `now`. Unchanged files are links.

    Raises UserError if the disk has too little room, or if DeepSpeed cannot convert its part.
    """
    import torch

    optimizer = sum(file.stat().st_size for file in checkpoint.glob("global_step*/*_optim_states.pt"))
    need, free = SPACE * optimizer / 2**30, shutil.disk_usage(place.parent).free / 2**30
    if need > free:
        wrong = f"converting {checkpoint} needs {need:.3g} GiB in {place.parent}, which has {free:.3g} GiB"
        raise UserError(wrong, "--resume")
    if optimizer:
        say("converting", f"{checkpoint} for the new launch, in {place} (up to {need:.2g} GiB, until it is loaded)")
    place.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.is_file() and not file.name.startswith(("progress_", "rng_state", "latest")):
            (place / file.name).symlink_to(file.resolve())
    states = [
        torch.load(checkpoint / STATE_FILE.format(rank=rank), weights_only=True, map_location="cpu")
        for rank in range(then.processes)
    ]
    for rank, state in enumerate(spread(states, then, now)):
        torch.save(state, place / STATE_FILE.format(rank=rank))
        source = checkpoint / rng_file(rank % then.processes, then.processes)
        (place / rng_file(rank, now.processes)).symlink_to(source.resolve())
    if now.zero_stage:
        try:
            _universal(next(checkpoint.glob("global_step*")), place)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            wrong = f"DeepSpeed cannot convert {checkpoint} ({why}); resume it with the old launch"
            raise UserError(wrong, "--resume") from error


def rng_file(rank: int, ranks: int) -> str:
    return f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"


def spread(states: Sequence[dict[str, Any]], then: Layout, now: Layout) -> list[dict[str, Any]]:
    """Return the states of `now`'s processes, made from those of `then`'s. Most values are equal on all processes."""
    import torch

    first = dict(states[0])
    first["loss"] = torch.stack([state["loss"] for state in states]).mean()  # a log shows the mean over processes
    if 3 in (then.zero_stage, now.zero_stage):
        first["initial"] = None  # sums of each process's own part
    buffers: list[list] = [[] for _ in range(now.processes)]
    if "buffer" in first:
        first["step"] = first["step"] * now.generation // then.generation
        buffers = _dealt([state["buffer"] for state in states], then, now)
    others = {**first, "reference": {}} if "reference" in first else first  # only rank 0 reads it
    own = [first if rank == 0 else others for rank in range(now.processes)]
    if "buffer" not in first:
        return own
    rows = [row for state in states for row in state.get("ahead", {}).get("rows", ())]  # a process has successive rows
    share = len(rows) // now.processes
    parts = [rows[rank * share : (rank + 1) * share] for rank in range(now.processes)]
    coming = [{**first["ahead"], "rows": part} if rows else {} for part in parts]
    return [{**state, "buffer": buffer, "ahead": one} for state, buffer, one in zip(own, buffers, coming, strict=True)]


def _dealt(buffers: Sequence[list[dict[str, Any]]], then: Layout, now: Layout) -> list[list[dict[str, Any]]]:
    """Deal the rows of all processes' micro-batches out again, so that each update has the rows that it had."""
    dealt: list[list[dict[str, Any]]] = [[] for _ in range(now.processes)]
    together = math.gcd(then.generation, then.accumulation)  # micro-batches that are trained in one update
    for start in range(0, len(buffers[0]), together):
        whole = _joined([buffer[i] for i in range(start, start + together) for buffer in buffers])
        for number, row in enumerate(range(0, len(whole["traces"]), now.rows)):
            part = {
                name: values if getattr(values, "ndim", 1) == 0 else values[row : row + now.rows]
                for name, values in whole.items()
            }
            copied = {name: values if isinstance(values, list) else values.clone() for name, values in part.items()}
            dealt[number % now.processes].append(copied)
    return dealt


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return all rows as one micro-batch. Prompts are padded on the left, all else on the right, with zeros."""
    import torch

    def column(name: str) -> Any:
        values = [part[name] for part in parts]
        if isinstance(values[0], list):
            return [value for rows in values for value in rows]
        if values[0].ndim < 2:
            return torch.cat(values) if values[0].ndim else values[0]
        width = max(rows.shape[1] for rows in values)
        left = name.startswith("prompt")
        pads = [(width - rows.shape[1], 0) if left else (0, width - rows.shape[1]) for rows in values]
        return torch.cat([torch.nn.functional.pad(rows, pad) for rows, pad in zip(values, pads, strict=True)])

    return {name: column(name) for name in parts[0]}


def _universal(source: Path, place: Path) -> None:
    """Convert DeepSpeed's folder `source` to a universal checkpoint that every stage from 1 to 3 can load.

    DeepSpeed's converter writes what stages 1 and 2 read, or what stage 3 reads. They differ in the form of the
    tensors, in the place of the optimizer's step, and in the name of the model's state.
    """
    import torch
    from deepspeed.checkpoint import PARAM, ds_to_universal

    target = place / source.name
    words = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(source), "output_folder": str(target)}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(Namespace(**words, **folders, inject_missing_state=True))
    file = target / "zero" / "optimizer_state.pt"
    state, weights = torch.load(file, weights_only=True), [path.parent for path in target.glob("zero/*/exp_avg.pt")]
    if "optimizer_state_dict" in state:  # written by stage 3
        step = state["optimizer_state_dict"]["state"][0]["step"]
        for part in target.glob("zero/*/*.pt"):
            torch.save({PARAM: torch.load(part, weights_only=True)}, part)
        for folder in weights:
            torch.save(step, folder / "step.pt")
    else:
        step = torch.load(weights[0] / "step.pt", weights_only=True)
    kept = {name: value for name, value in state.items() if name not in ("fp32_flat_groups", "optimizer_state_dict")}
    brief = {"state": {0: {"step": step}}, "param_groups": state["param_groups"]}
    torch.save({"ds_version": version("deepspeed"), **kept, "optimizer_state_dict": brief}, file)
    (model,) = sorted(target.glob("*mp_rank_00_model_states.pt"))[:1]
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        if not (target / name).exists():
            (target / name).symlink_to(model.name)


def settle(optimizer: Any, place: Path) -> None:
    """Correct what DeepSpeed has loaded from a universal checkpoint into torch's optimizer.

    At stage 3 it gives the options of the first group of weights to all groups, and one tensor as the step of all
    groups, so that each step would count once for each group.
    """
    import torch

    (file,) = place.glob("global_step*/zero/optimizer_state.pt")
    groups = torch.load(file, weights_only=True)["param_groups"]
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()
