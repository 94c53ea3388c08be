"""The keys and the inputs in which a resumed run must agree with the run that it continues.

Keys and inputs come in as values; the checkpoint holds those of the first run (trainer/checkpoint.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rewards import REWARDS
from rewards.own import source_files
from sparse_rl.files import fingerprint
from sparse_rl.models.weights import file_fingerprints
from trainer.checkpoint import checkpoint_of

MAY_CHANGE = (
    *("output_dir", "run_name", "report_to", "logging_steps", "save_steps", "save_total_limit", "disable_tqdm"),
    *("log_completions", "num_completions_to_print", "rollout.progress", "replay_guard.enabled"),
    *("launch.machines", "launch.machine_rank", "launch.main_process_ip", "launch.main_process_port"),
)
MAY_CHANGE_BUT_FOR_ROUNDING = (
    *("gradient_checkpointing", "rollout.max_batch", "rollout.kv_cache_gb", "rollout.gpu_memory_utilization"),
    *("rollout.max_model_len", "rollout.sleep", "rollout.full_graphs", "rollout.exact", "attention_kernel"),
    "validation.data.max_prompt_tokens",  # older checkpoints may have none; the rows are compared by fingerprint
)
LENGTH = ("max_steps", "num_train_epochs")  # may also change if the learning rate does not depend on these keys
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")


def checkpoint_to_resume(recipe: Mapping[str, Any], resume: str, inputs: Mapping[str, str] | None = None) -> Path:
    """Return the checkpoint that `--resume` selects. Raises UserError if a key or an input differs that must not.

    recipe : every key of the recipe, as `Recipe.resolved` returns them
    inputs : from `input_fingerprints`; None means that inputs are not compared
    """
    changeable: tuple[str, ...] = MAY_CHANGE
    if recipe["lr_scheduler_type"] in ENDLESS and not 0 < recipe["warmup_steps"] < 1:
        changeable += LENGTH
    if recipe.get("attention_kernel") == "auto":
        changeable += ("attention_kernel",)  # not chosen yet: the training processes choose a kernel and check again
    return checkpoint_of(resume, recipe, inputs, changeable, MAY_CHANGE_BUT_FOR_ROUNDING)


def input_fingerprints(
    datasets: Mapping[str, Any], files: Mapping[str, tuple[str | None, bool]], rewards: Iterable[Any]
) -> dict[str, str]:
    """Return the fingerprints, by name, of all rows and files that a recipe gives by path or name.

    datasets : dotted key -> rows; None for a dataset that the recipe does not have
    files : key -> (directory, file or hub name; None for none, True if its weights are read)
    """
    inputs = {f"rows of {key}": _rows(rows) for key, rows in datasets.items() if rows is not None}
    for key, (place, weights) in files.items():
        if place is not None:
            digests = file_fingerprints(place, weights)
            inputs |= {f"{key}/{name}": value for name, value in digests.items()}
    for reward in {spec if isinstance(spec, str) else spec["name"] for spec in rewards} - {*REWARDS}:
        inputs |= {f"module {name} of {reward}": fingerprint(file) for name, file in source_files(reward).items()}
    return inputs


def _rows(rows: Any) -> str:
    digest = hashlib.sha256()
    for table in rows.with_format("arrow").iter(1000):
        for row in table.to_pylist():
            digest.update(repr(sorted(row.items())).encode("utf-8", "surrogatepass"))
    return f"{len(rows):,} rows, {digest.hexdigest()[:16]}"
