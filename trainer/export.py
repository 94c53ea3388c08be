"""Ends a training: writes the final model, pushes it to the Hub, and closes the engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from sparse_rl.attention.families import family_only_hf
from sparse_rl.errors import NotFiniteError, StoppedError
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.models.base import base_of
from sparse_rl.models.directory import save_policy, saved_policy
from sparse_rl.policies.registry import make_policy
from sparse_rl.progress import stage
from trainer.card import model_card
from trainer.checkpoint import PARTIAL, clear_partial, failure, publish
from trainer.finite import not_finite_weight
from trainer.resumable import HUB_ERRORS
from trainer.resume import versions

logger = logging.getLogger("sparse_rl")


def export_model(trainer: Any, place: Path, *, lora: bool, cache: PolicyConfig | None) -> None:
    """Write the final model and its card as a Hugging Face directory, and push it if `push_to_hub` is set.

    place : directory to write; it is always complete or absent
    lora : True merges the adapter into the model, and also writes the adapter to a directory beside `place`
    cache : policy to save in the directory; None saves no policy here (the trainer may have saved one)
    """
    partial, first = place.parent / PARTIAL, trainer.is_world_process_zero()
    with stage("saving", "the final model"):
        trainer.stop_unless_finite()
        try:
            _write_model(trainer, partial / place.name, lora, cache)
            if first and trainer.recipe is not None:
                (partial / place.name / "README.md").write_text(
                    _card(trainer, partial / place.name, place), encoding="utf-8"
                )
            if first:
                for folder in filter(Path.exists, (partial / "adapter", partial / place.name)):
                    publish(folder, place.with_name(folder.name))
        except Exception as error:
            stopped = failure("the final model", place.parent, error)  # before clear_partial frees the full disk
            clear_partial(place.parent)
            raise stopped from error
        trainer.accelerator.wait_for_everyone()
    if trainer.args.push_to_hub and first:
        with stage("uploading", trainer.hub_model_id):
            _push(trainer, place)


def _write_model(trainer: Any, folder: Path, lora: bool, cache: PolicyConfig | None) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    if lora:
        trainer.save_model(str(folder.with_name("adapter")), _internal_call=True)  # else save_model pushes to the Hub
        if trainer.is_world_process_zero():
            merged = model.merge_and_unload()
            if wrong := not_finite_weight(merged.named_parameters()):
                raise NotFiniteError(f"after merging the adapter, {wrong}")
            merged.save_pretrained(folder)
    else:
        trainer.save_model(str(folder), _internal_call=True)
    if trainer.is_world_process_zero():
        trainer.processing_class.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        if cache is not None:
            save_policy(folder, make_policy(cache))


def _card(trainer: Any, folder: Path, place: Path) -> str:
    return model_card(
        trainer.recipe,
        saved_policy(folder),
        versions(),
        steps=trainer.state.global_step,
        place=place,
        chat=bool(trainer.processing_class.chat_template),
        served=family_only_hf(base_of(trainer.accelerator.unwrap_model(trainer.model)).config) is None,
        hub_name=trainer.hub_model_id if trainer.args.push_to_hub else None,
    )


def _push(trainer: Any, place: Path) -> None:
    name = trainer.hub_model_id
    try:
        HfApi().upload_folder(
            repo_id=name, folder_path=place, commit_message="A model trained by sparse-rl",
            revision=trainer.args.hub_revision,
        )  # fmt: skip
    except HUB_ERRORS as error:
        first = str(error).strip().partition("\n")[0]
        mend = f"push it with `hf upload {name} {place}`"
        raise StoppedError(f"{place} is complete, but was not pushed to {name} ({first}); {mend}") from error


def close_engine(trainer: Any) -> None:
    """Close the trainer's engine, if any. A failure to close is only logged, to not hide the error of the run."""
    try:
        if hasattr(trainer, "engine"):
            trainer.engine.close()
    except Exception:
        logger.warning("the engine could not be closed", exc_info=True)
