"""What a training leaves at its end: the final model, whole or not there; and its engine closed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sparse_rl.models.directory import save_policy
from sparse_rl.policies.config import PolicyConfig
from sparse_rl.policies.registry import make_policy
from trainer.checkpoint import PARTIAL, clear_partial, failure, publish

logger = logging.getLogger("sparse_rl")


def export_model(trainer: Any, place: Path, *, lora: bool, cache: PolicyConfig | None) -> None:
    """The final model as a plain Hugging Face directory, whole or not there.

    lora : merge the adapter into it, and write the adapter beside it
    cache : the policy that the directory is to carry; None: none, or the trainer writes it
    """
    made = place.parent / PARTIAL
    try:
        _write_model(trainer, made / place.name, lora, cache)
        if trainer.is_world_process_zero():
            for folder in filter(Path.exists, (made / "adapter", made / place.name)):
                publish(folder, place.with_name(folder.name))
    except Exception as error:
        stopped = failure("the final model", place.parent, error)  # before what has filled the disk goes
        clear_partial(place.parent)
        raise stopped from error
    trainer.accelerator.wait_for_everyone()


def _write_model(trainer: Any, folder: Path, lora: bool, cache: PolicyConfig | None) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    if lora:
        trainer.save_model(str(folder.with_name("adapter")))
        if trainer.is_world_process_zero():
            model.merge_and_unload().save_pretrained(folder)
    else:
        trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        trainer.processing_class.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        if cache is not None:
            save_policy(folder, make_policy(cache))


def close_engine(trainer: Any) -> None:
    """What goes wrong here is only logged: it must not hide the error that ended the run."""
    try:
        if hasattr(trainer, "engine"):
            trainer.engine.close()
    except Exception:
        logger.warning("the engine did not close", exc_info=True)
