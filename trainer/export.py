"""Ends a training: writes the final model with its card, pushes it to the Hub, and closes the engine."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import httpx

from sparse_rl.attention.families import family_only_hf
from sparse_rl.errors import NotFiniteError, StoppedError, UserError
from sparse_rl.models.centres import copy_centres
from sparse_rl.models.directory import save_policy, saved_policy
from sparse_rl.models.load import base_of, load_config, save_tokenizer
from sparse_rl.policies.base import Policy
from sparse_rl.progress import stage
from sparse_rl.source import how_to_install
from trainer.base import not_finite_weight
from trainer.checkpoint import PARTIAL, clear_partial, failure, publish, versions

logger = logging.getLogger("sparse_rl")
MESSAGE = "A model trained by sparse-rl"  # of the commit on the Hub


def export_model(trainer: Any, place: Path, *, lora: bool) -> None:
    """Write the final model and its card as a Hugging Face directory, and push it if `push_to_hub` is set.

    place : directory to write; it is always complete or absent
    lora : True merges the adapter into the model, and also writes the adapter to a directory beside `place`
    """
    partial, first = place.parent / PARTIAL, trainer.is_world_process_zero()
    with stage("saving", "the final model"):
        trainer.stop_unless_finite()
        try:
            _write_model(trainer, partial / place.name, lora)
            if first:
                if trainer.recipe is not None:
                    config = base_of(trainer.accelerator.unwrap_model(trainer.model)).config
                    card = model_card(
                        trainer.recipe,
                        saved_policy(partial / place.name),
                        versions(),
                        steps=trainer.state.global_step,
                        place=place,
                        served=family_only_hf(config) is None,
                        hub_name=trainer.hub_model_id if trainer.args.push_to_hub else None,
                    )
                    (partial / place.name / "README.md").write_text(card, encoding="utf-8")
                for folder in filter(Path.exists, (partial / "adapter", partial / place.name)):
                    publish(folder, place.with_name(folder.name))
        except Exception as error:
            stopped = failure("the final model", place.parent, error)  # before clear_partial frees the full disk
            clear_partial(place.parent)
            raise stopped from error
        trainer.accelerator.wait_for_everyone()
    if trainer.args.push_to_hub and first:
        name, revision = trainer.hub_model_id, trainer.args.hub_revision
        with stage("uploading", name):
            try:
                HfApi().upload_folder(repo_id=name, folder_path=place, commit_message=MESSAGE, revision=revision)
            except (OSError, ValueError, httpx.HTTPError) as error:  # no network, no permission, no such name
                mend = f"push it with `hf upload {name} {place}`"
                line = str(error).strip().partition("\n")[0]
                raise StoppedError(f"{place} is complete, but was not pushed to {name} ({line}); {mend}") from error


def _write_model(trainer: Any, folder: Path, lora: bool) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    _restore(base_of(model).config)
    if lora:
        trainer.save_model(str(folder.with_name("adapter")), _internal_call=True)  # else save_model pushes to the Hub
        if trainer.is_world_process_zero():
            merged = model.merge_and_unload()
            if wrong := not_finite_weight(merged.named_parameters()):
                raise NotFiniteError(f"after merging the adapter, {wrong}")
            merged.save_pretrained(folder)
            if trainer.policy is not None:
                save_policy(folder, trainer.policy)
                copy_centres(base_of(model).config._name_or_path, folder, trainer.policy)
    else:
        trainer.save_model(str(folder), _internal_call=True)
    if trainer.is_world_process_zero():
        save_tokenizer(trainer.processing_class, folder)
        model.generation_config.save_pretrained(folder)


def _restore(config: Any) -> None:
    """Restore the settings of the start model that the Trainer changes: it aligns token ids, and disables the cache."""
    with suppress(UserError):  # the start model's directory may have moved
        start = load_config(config._name_or_path)
        for name in ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(start, name, None))


def close_engine(trainer: Any) -> None:
    """Close the trainer's engine, if any. A failure is only logged, to not hide the error of the run."""
    try:
        if hasattr(trainer, "engine"):
            trainer.engine.close()
    except Exception:
        logger.warning("the engine could not be closed", exc_info=True)


def evaluation_of(task: str | None, model: str) -> str | None:
    """Return the arguments of `sparse-rl eval` for a model trained on a synthetic task (None: the user's own data)."""
    commands = {None: f"eval/math500 model={model}", "running_sum": f"quickstart/eval model={model} cache=null"}
    return commands.get(task)


def model_card(
    recipe: Mapping[str, Any],
    policy: Policy | None,
    versions: Mapping[str, str],
    *,
    steps: int,
    place: str | Path,
    served: bool = True,
    hub_name: str | None = None,
) -> str:
    """Return the card as Markdown, preceded by the metadata that the Hub reads.

    recipe, policy : the resolved recipe, and the cache policy that is saved with the model; None means a full cache
    served : False if vLLM cannot sample from a model of this family
    hub_name : repository name on the Hub; None if the model is not pushed
    """
    base, kind = recipe["model"], recipe["kind"]
    about = ModelCardData(
        base_model=base if base.count("/") == 1 and not Path(base).exists() else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["sparse-rl", kind, *([] if policy is None else [policy.name])],
    )
    cache = "none: a full cache" if policy is None else f"`{policy!r}`"
    if policy is not None and policy.schedule.peak is not None:
        cache += f", which holds at most {policy.schedule.peak} entries per kv head while tokens are generated"
    if recipe.get("prompt_cache"):
        cache += "; the contexts of its prompts were compacted, by the recipe's `prompt_cache`"
    # The commands of a card at an absolute path are run in its directory.
    directory = hub_name.split("/")[-1] if hub_name else "." if Path(place).is_absolute() else str(place)
    local = shlex.quote(directory)
    only_hf = not served or (policy is not None and policy.config.only_hf is not None)
    commands = [] if hub_name is None else [f"hf download {hub_name} --local-dir {local}"]
    commands += [] if only_hf else [f"sparse-rl serve {local}  # vLLM's OpenAI server"]
    evaluation = evaluation_of((recipe["data"].get("synthetic") or {}).get("task"), local)
    commands += [f"sparse-rl eval {evaluation}  # accuracy"] if evaluation else []
    card = ModelCard.from_template(
        about,
        template_path=str(Path(__file__).with_name("card.md.j2")),
        name=Path(place).resolve().parent.name if hub_name is None else directory,
        install=how_to_install("" if only_hf else "vllm"),
        base=base,
        kind=kind,
        steps=steps,
        cache=cache,
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        commands="\n".join(commands),
        local=directory,
        recipe=yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True).strip(),
    )
    return card.content
