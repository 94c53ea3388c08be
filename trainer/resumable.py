"""A transformers Trainer whose runs resume exactly, as if they had never stopped.

Use it as `class X(Resumable)`, or in front of another trainer: `class X(Resumable, GRPOTrainer)`.

transformers saves weights, optimizer, scheduler, random states, step and the position in the data. This module adds
checkpoints that are complete or absent (trainer/checkpoint.py), and one file per process with the state that
transformers would lose. A trainer with further state extends `extra_state` and `load_extra_state`.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from accelerate.utils import gather_object, patch_environment
from torch.utils.data import Sampler
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler

from sparse_rl.errors import NotFiniteError, StoppedError, UserError
from sparse_rl.experts.routing import has_experts
from sparse_rl.models.load import load_weights
from sparse_rl.progress import stage
from trainer.arguments import refusals
from trainer.checkpoint import (
    PARTIAL,
    clear_partial,
    failure,
    file_digests,
    keep_last,
    newest_whole,
    publish,
    remove,
    set_aside_later,
    write_manifest,
)
from trainer.deepspeed import deepspeed_classes
from trainer.finite import not_finite_metric, not_finite_weight
from trainer.resume import versions
from trainer.scored.trainer import Scored

logger = logging.getLogger("sparse_rl")
STATE_FILE = "progress_{rank}.pt"
HUB_ERRORS = (OSError, ValueError, httpx.HTTPError)  # from huggingface_hub: no network, no permission, no such name

# With several processes on a CPU, accelerate names the devices "cpu:0" and so on, which torch.load does not accept.
torch.serialization.register_package(
    100, lambda _: None, lambda data, place: data if place.startswith("cpu:") else None
)


@contextmanager
def reading(checkpoint: str | None) -> Iterator[None]:
    """Force weights_only for every torch.load in this block, and turn any failure into a one-line UserError.

    checkpoint : the folder that is read; None changes nothing in the block
    """
    if checkpoint is None:
        yield
        return
    try:  # torch reads this variable, which overrides DeepSpeed's weights_only=False
        with (
            patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"),
            torch.serialization.safe_globals(deepspeed_classes()),
        ):
            yield
    except (UserError, StoppedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        if isinstance(error, pickle.UnpicklingError):  # torch's message advises the user to trust the file
            why = "one of its files holds more than plain data and tensors"
        raise UserError(f"{checkpoint} cannot be loaded: {why}", "--resume") from error


@contextmanager
def known_metric() -> Iterator[None]:
    """Raise UserError in place of transformers' KeyError if validation does not report metric_for_best_model."""
    try:
        yield
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        raise UserError(f"an option is refused: {error.args[0]}") from error


class EpochSampler(Sampler):
    """TRL's sampler with an order that depends only on the seed and the epoch.

    So a run that resumes in a later epoch visits the data in the same order as an uninterrupted run.
    """

    def __init__(self, sampler: RepeatSampler) -> None:
        self.sampler, self.epoch = sampler, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed((self.sampler.seed or 0) + self.epoch)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class Resumable(Scored):
    """A Trainer whose runs resume exactly. recipe : the recipe as plain data, for the checkpoint's manifest"""

    recipe: dict[str, Any] | None = None
    _writing = False
    _ended = False
    _resumed: str | None = None  # the checkpoint that this run resumes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with refusals():
            super().__init__(*args, **kwargs)
        self.args.logging_nan_inf_filter = False  # the filter hides a NaN loss, and waits for the device at every batch
        self.add_callback(_AtStart(self))

    def sampling_seed(self, generation: int | None) -> int:
        """Return a sampling seed for generation number `generation`; None means validation.

        Two ranks may sample the same prompt, so each rank has a seed of its own.
        """
        number = self.args.seed if generation is None else (self.args.seed + 1) * 1_000_003 + generation
        return number * self.accelerator.num_processes + self.accelerator.process_index

    # ---- options that are checked only here -----------------------------------------------------------------------

    def create_optimizer(self, *args: Any) -> Any:
        with refusals(TypeError, ImportError):
            return super().create_optimizer(*args)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with refusals(TypeError):
            return super().create_scheduler(*args, **kwargs)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with refusals():
            return super()._get_dataloader(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with known_metric(), stage("evaluating"):
            return super()._evaluate(*args, **kwargs)

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        with known_metric():
            return super()._determine_best_metric(*args, **kwargs)

    # ---- finite numbers only --------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the values, and then raise NotFiniteError if the logged loss or gradient norm is not finite."""
        skipped = self.accelerator.optimizer_step_was_skipped  # float16: the gradient overflowed, and was not used
        wrong = not_finite_metric({k: v for k, v in logs.items() if not (skipped and k == "grad_norm")})
        super().log(logs, *args, **kwargs)
        self._stop_at(wrong)

    def stop_unless_finite(self) -> None:
        """Raise NotFiniteError on every process if a loss or a weight of any process is not finite."""
        assert self.model is not None
        loss = {"loss": self._tr_loss.item()} if self.is_in_train else {}  # since the last log
        problem = not_finite_metric(loss) or not_finite_weight(self.model.named_parameters())
        self._stop_at(next(filter(None, gather_object([problem])), None))

    def models(self) -> dict[str, Any]:
        """Return name -> model for the models whose weights must be finite at the start. Errors show the name."""
        return {"the model": self.model}

    @contextmanager
    def refused_at_this_step(self) -> Iterator[None]:
        """Add the step and the newest complete checkpoint to the message of an engine's NotFiniteError."""
        try:
            yield
        except NotFiniteError as error:
            raise NotFiniteError(f"at step {self.state.global_step} {error}; {self._newest_checkpoint()}") from error

    def _stop_at(
        self, reason: str | None, mend: str = "start again with a lower learning_rate or max_grad_norm"
    ) -> None:
        if reason is not None:
            raise NotFiniteError(f"at step {self.state.global_step} {reason}: {mend}; {self._newest_checkpoint()}")

    def _newest_checkpoint(self) -> str:
        run = Path(self._get_output_dir(None))
        newest = newest_whole(run)
        return f"{newest} is complete" if newest else f"{run} has no checkpoint"

    # ---- state in checkpoints -------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """Return the part of this process's state that transformers does not restore, as plain data and tensors."""
        ended = self.control.should_training_stop and self.state.global_step < self.state.max_steps
        state: dict[str, Any] = {
            "ended": ended,  # stopped early by a callback, which would not stop the resumed run again
            "loss": self._tr_loss.cpu(),  # since the last log
            "loss_total": self._total_loss_scalar,
            "logged_step": self._globalstep_last_logged,
        }
        trl: Any = self
        if hasattr(trl, "_metrics"):  # since the last log
            state["metrics"] = {mode: dict(values) for mode, values in trl._metrics.items()}
            state["train_tokens"] = trl._total_train_tokens
        return state

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state from `extra_state`. Called after transformers has restored everything else."""
        self._ended = state["ended"]
        self._tr_loss = state["loss"].to(self.args.device)
        self._total_loss_scalar, self._globalstep_last_logged = state["loss_total"], state["logged_step"]
        trl: Any = self
        if "metrics" in state:
            for mode, values in state["metrics"].items():
                trl._metrics[mode].update(values)
            trl._total_train_tokens = state["train_tokens"]

    # ---- saving ---------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, PARTIAL) if self._writing else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.stop_unless_finite()
        run, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        partial, self._writing = run / PARTIAL / name, True
        with stage("saving", name):
            try:
                super()._save_checkpoint(model, trial)
                self._save_more(run, partial)
            except Exception as error:  # the launcher ends the other processes with this one
                failed = failure(name, run, error)  # before `remove` frees the full disk
                remove(partial)
                raise failed from error
            finally:
                self._writing = False
            self.accelerator.wait_for_everyone()

    def _save_more(self, run: Path, partial: Path) -> None:
        """Add the state that transformers would lose to the checkpoint in `partial`, and publish the checkpoint."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        torch.save(self.extra_state(), partial / STATE_FILE.format(rank=rank))
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent.name == PARTIAL:  # this checkpoint, under its temporary path
            self.state.best_model_checkpoint = str(run / partial.name)
            if self.args.should_save:
                self.state.save_to_json(str(partial / "trainer_state.json"))
        self.accelerator.wait_for_everyone()
        files = gather_object(list(file_digests(partial, slice(rank, None, ranks)).items()))
        if self.is_world_process_zero():
            plugin = self.accelerator.state.deepspeed_plugin
            launch = {"processes": ranks, "zero_stage": 0 if plugin is None else plugin.zero_stage}
            about = {"step": self.state.global_step, **launch, "recipe": self.recipe, "versions": versions()}
            write_manifest(partial, dict(files), **about)
            publish(partial, run / partial.name)
            keep_last(run, self.args.save_total_limit, self.state.best_model_checkpoint)

    # ---- a hub ----------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository for the final model (trainer/export.py) before training starts."""
        try:
            super().init_hf_repo(token)
        except HUB_ERRORS as error:
            line = str(error).strip().partition("\n")[0]
            mend = "log in with `hf auth login`, or remove push_to_hub"
            raise UserError(f"the Hub did not create the repository ({line}); {mend}", "push_to_hub") from error

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write no card beside the checkpoints: only the final model has a card (trainer/card.py)."""

    # ---- resuming -------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        target: Any = self.model if model is None else model
        with reading(resume_from_checkpoint):
            if hasattr(target, "get_base_model") or not has_experts(target):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            else:  # transformers would find no weights of experts: files hold one tensor for each expert
                self._issue_warnings_after_load(load_weights(target, resume_from_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn about missing and unexpected weights. A tied weight that was loaded by another name is not missing."""
        model: Any = self.model
        weights, missing = dict(model.named_parameters(remove_duplicate=False)), set(load_result.missing_keys)
        loaded = {id(weight) for name, weight in weights.items() if name not in missing}
        lacking = [name for name in load_result.missing_keys if id(weights.get(name)) not in loaded]
        super()._issue_warnings_after_load(type(load_result)(lacking, load_result.unexpected_keys))

    def _prepare_for_training(self, max_steps: int, dataloader: Any, checkpoint: str | None) -> Any:
        self._resumed = checkpoint
        with reading(checkpoint):  # loads the optimizer, the scheduler, and all of DeepSpeed's state
            return super()._prepare_for_training(max_steps, dataloader, checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        places = super()._init_training_state(max_steps, *args)
        # Without this call, the checkpoint's intervals of logging and saving would apply.
        self.state.compute_steps(self.args, max_steps)
        return places

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch. If the resumed run had already ended, do nothing: transformers would take one more step."""
        if self._ended or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _at_start(self) -> None:
        run, checkpoint = Path(self._get_output_dir(None)), self._resumed
        if checkpoint is not None:
            file = Path(checkpoint) / STATE_FILE.format(rank=self.accelerator.process_index)
            if not file.is_file():
                wrong = "another trainer or fewer processes wrote this checkpoint"
                raise UserError(f"{checkpoint} has no {file.name}: {wrong}")
            with reading(checkpoint):
                self.load_extra_state(torch.load(file, weights_only=True, map_location="cpu"))
        if self.is_world_process_zero():
            clear_partial(run)
            for path in set_aside_later(run, self.state.global_step) if checkpoint is not None else ():
                logger.warning("a checkpoint after step %d was renamed to %s", self.state.global_step, path)
        problems = ((label, not_finite_weight(model.named_parameters())) for label, model in self.models().items())
        problem = next(
            (f"{label} at the start of training is damaged, {wrong}" for label, wrong in problems if wrong), None
        )
        self._stop_at(next(filter(None, gather_object([problem])), None), "use an undamaged copy of the model")


class _AtStart(TrainerCallback):
    """Calls the trainer's `_at_start` before the first step, after transformers has restored and reset everything."""

    def __init__(self, trainer: Resumable) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer._at_start()
