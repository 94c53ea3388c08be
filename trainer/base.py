"""The base of all trainers: a transformers Trainer whose runs resume exactly, as if they had never stopped.

`Resumable` adds to transformers' checkpoints that they are complete or absent (checkpoint.py), the state that
transformers would lose, and the scorers of a learned policy.

It also stops a run whose loss, gradient norm or weights are not finite. The checks never make a step wait for the
device: loss and norm are checked when they are logged, and weights when they are written. No NaN is missed: the logged
loss is a sum over all steps since the last log, and a NaN gradient makes the weights NaN.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object, patch_environment
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from trl.trainer.utils import create_model_from_path

from sparse_rl.errors import NotFiniteError, StoppedError, UserError
from sparse_rl.experts import has_experts
from sparse_rl.methods.kvpop.policy import KVpop
from sparse_rl.methods.kvpop.scorers import NOT_DECAYED
from sparse_rl.metrics import UNCHANGED
from sparse_rl.models.centres import copy_centres
from sparse_rl.models.directory import SCORERS, read_scorers, save_policy, write_scorers
from sparse_rl.models.load import base_of, load_weights, read_model, writable
from sparse_rl.models.weights import file_fingerprints
from sparse_rl.policies.base import Policy
from sparse_rl.progress import stage
from trainer.arguments import refusals
from trainer.checkpoint import (
    MANIFEST,
    PARTIAL,
    checkpoint_to_resume,
    clear_partial,
    failure,
    file_digests,
    keep_last,
    locked,
    newest_whole,
    publish,
    read_manifest,
    refuse_used,
    remove,
    rows_fingerprint,
    set_aside_later,
    versions,
    write_manifest,
)
from trainer.config import ScorersConfig
from trainer.losses import ScorerLoss
from trainer.reshard import STATE_FILE, Layout, reshard, settle
from trainer.sampler import SamplerSettings
from trainer.teacher import INDEX, TeacherCache

logger = logging.getLogger("sparse_rl")
LOGGED = ("loss", "train_loss", "grad_norm")


def not_finite_metric(logs: Mapping[str, Any]) -> str | None:
    """Describe the first logged loss or gradient norm that is not finite, or return None."""
    return next((f"{name} is {logs[name]}" for name in LOGGED if not math.isfinite(logs.get(name, 0.0))), None)


@torch.no_grad()
def not_finite_weight(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Describe the first weight whose float32 norm is not finite; under ZeRO-3 of this process's own part."""
    parts = [(name, getattr(weight, "ds_tensor", weight)) for name, weight in weights if weight.is_floating_point()]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for _, part in parts]
    finite = torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().tolist()
    return next((f"{name} is not finite" for (name, _), good in zip(parts, finite, strict=True) if not good), None)


@torch.no_grad()
def bit_sums(weights: Iterable[tuple[str, Tensor]]) -> list[int]:
    """Return the sum of the bits of each weight, read as whole numbers; under ZeRO-3 of this process's own part."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    parts = [getattr(weight, "ds_tensor", weight) for _, weight in weights]
    sums = [part.view(whole[part.element_size()]).sum(dtype=torch.int64) for part in parts]
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist()


# With several processes on a CPU, accelerate names the devices "cpu:0" and so on, which torch.load does not accept.
torch.serialization.register_package(
    100, lambda _: None, lambda data, place: data if place.startswith("cpu:") else None
)


def _deepspeed_classes() -> list[Any]:
    """Return the classes that torch may unpickle from DeepSpeed's files."""
    if "deepspeed" not in sys.modules:
        return []
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


@contextmanager
def text_parts(module: Any) -> Iterator[None]:
    """Let a module of TRL load its models by `read_model` in this block: the text part of a multimodal model."""
    architecture: Any = SimpleNamespace(from_pretrained=read_model)
    module.create_model_from_path = partial(create_model_from_path, architecture=architecture)
    try:
        yield
    finally:
        module.create_model_from_path = create_model_from_path


@contextmanager
def reading(checkpoint: str | None) -> Iterator[None]:
    """Force weights_only for every torch.load of a checkpoint in this block, and turn a failure into a UserError."""
    if checkpoint is None:
        yield
        return
    try:  # torch reads this variable, which overrides DeepSpeed's weights_only=False
        plain = patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1")
        with plain, torch.serialization.safe_globals(_deepspeed_classes()):
            yield
    except (UserError, StoppedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        if isinstance(error, pickle.UnpicklingError):  # torch's message advises the user to trust the file
            why = "one of its files holds more than plain data and tensors"
        raise UserError(f"{checkpoint} cannot be loaded: {why}", "--resume") from error


class Resumable(Trainer):
    """A Trainer whose runs resume exactly. Use it as `class X(Resumable)`, or as `class X(Resumable, GRPOTrainer)`.

    The model may carry the scorers of a learned policy, in the module list `cache_scorers`. A trainer with further
    state extends `extra_state` and `load_extra_state`.

    recipe, inputs : for manifests: the recipe as plain data, and the fingerprints of its rows and files; without a
        recipe, the arguments of the trainer take its place
    sampler : settings of sampling; None if the training does not sample
    policy : cache policy that is saved with the model, or None
    learned_policy, scorer_learning_rate, scorer_loss : policy of the scorers, their learning rate and their boundary
        loss; None if the model has no scorers, they are not trained, or the loss is not used
    """

    sampler: SamplerSettings | None = None
    policy: Policy | None = None
    learned_policy: Policy | None = None
    scorer_learning_rate: float | None = None
    scorer_loss: ScorerLoss | None = None
    recipe: dict[str, Any] | None = None
    inputs: dict[str, str] | None = None
    _writing = False
    _ended = False
    _resumed: str | None = None  # the checkpoint that this run resumes
    _copied: str | None = None  # its copy for this launch, until that is loaded
    _initial: list[int] | None = None  # sums of the initial weights; None if an older checkpoint lacks them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with refusals():
            super().__init__(*args, **kwargs)
        model = base_of(self.model)
        model.generation_config = writable(model.generation_config)
        self.args.logging_nan_inf_filter = False  # the filter hides a NaN loss, and waits for the device at every batch
        at_start: Any = TrainerCallback()
        at_start.on_train_begin = lambda *_, **__: self._at_start()
        self.add_callback(at_start)

    def sampling_seed(self, generation: int | None) -> int:
        """Return this rank's sampling seed (two ranks may sample the same prompt). generation : None for validation"""
        number = self.args.seed if generation is None else (self.args.seed + 1) * 1_000_003 + generation
        return number * self.accelerator.num_processes + self.accelerator.process_index

    # ---- scorers --------------------------------------------------------------------------------------------------

    def carry_scorers_of(self, policy: Policy, learn: ScorersConfig | None) -> None:
        """Save the engine's policy, and its scorers if it has any, with the model; train them if `learn` is given."""
        self.policy, self.learned_policy = policy, policy if policy.layered_parameters else None
        if learn is not None:
            self.scorer_learning_rate = learn.learning_rate
            self.scorer_loss = ScorerLoss(cast(KVpop, policy).config, learn.target, learn.boundary)
            base_of(self.model).cache_scorers.requires_grad_(True)

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer. Scorers that are trained form parameter groups with their own learning rate."""
        with refusals(TypeError, ImportError):
            if self.scorer_learning_rate is None:
                return super().create_optimizer(*([] if model is None else [model]))
            if self.optimizer is None:
                whole: Any = self.model if model is None else model
                decayed = set(self.get_decay_parameter_names(whole))
                groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
                for name, weight in whole.named_parameters():
                    if weight.requires_grad:
                        scorer = SCORERS in name.split(".")
                        key = scorer, name.split(".")[-1] not in NOT_DECAYED if scorer else name in decayed
                        groups.setdefault(key, []).append(weight)
                kind, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
                rates, decays = (self.args.learning_rate, self.scorer_learning_rate), (0.0, self.args.weight_decay)
                ordered = [
                    {"params": weights, "lr": rates[scorer], "weight_decay": decays[decay], "scorer": scorer}
                    for (scorer, decay), weights in sorted(groups.items(), key=lambda group: group[0])
                ]
                self.optimizer = kind(ordered, **options)
            return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        weights, folder = {}, str(output_dir or self.args.output_dir)
        if self.learned_policy is not None:
            weights = dict(base_of(self.model).state_dict() if state_dict is None else state_dict)
        super()._save(output_dir, state_dict)  # removes the scorers from its state_dict
        if self.learned_policy is not None:
            write_scorers(folder, weights)
        if self.policy is not None:
            save_policy(folder, self.policy)
            if not hasattr(self.model, "peft_config"):  # else these are adapters, of no model of their own
                copy_centres(base_of(self.model).config._name_or_path, folder, self.policy)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with stage("evaluating"):
            return super().evaluate(*args, **kwargs)

    # ---- finite numbers only --------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the values, at the end with UNCHANGED if it is so. Then raise NotFiniteError if one is not finite."""
        if "train_runtime" in logs:
            # transformers divides the loss of the whole run by the steps since it was resumed
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
            same = bit_sums(self._weights()) == self._initial
            logs |= {UNCHANGED: 1.0} if all(gather_object([same])) else {}
        skipped = self.accelerator.optimizer_step_was_skipped  # float16: the gradient overflowed, and was not used
        wrong = not_finite_metric({k: v for k, v in logs.items() if not (skipped and k == "grad_norm")})
        super().log(logs, *args, **kwargs)
        self._stop_at(wrong)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.model is not None
        return self.model.named_parameters()

    def stop_unless_finite(self) -> None:
        """Raise NotFiniteError on every process if a loss or a weight of any process is not finite."""
        loss = {"loss": self._tr_loss.item()} if self.is_in_train else {}  # since the last log
        problem = not_finite_metric(loss) or not_finite_weight(self._weights())
        self._stop_at(next(filter(None, gather_object([problem])), None))

    def models(self) -> dict[str, Any]:
        """Return the models whose weights must be finite at the start, by their names in errors."""
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
            "initial": self._initial,
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
        """Restore the state from `extra_state`. Called when weights, optimizer and trainer state are
        restored; transformers then restores the position in the data and the random states."""
        self._ended, self._initial = state["ended"], state.get("initial")
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
        best = run / f"checkpoint-{self.state.best_global_step}"
        if best.is_dir() or best.name == partial.name:  # transformers names `partial`, or where it was before
            self.state.best_model_checkpoint = str(best)
            if self.args.should_save:
                self.state.save_to_json(str(partial / "trainer_state.json"))
        self.accelerator.wait_for_everyone()
        files = gather_object(list(file_digests(partial, slice(rank, None, ranks)).items()))
        if self.is_world_process_zero():
            about = {"recipe": self.recipe or self.own_settings(), "inputs": self.inputs, "versions": versions()}
            write_manifest(partial, dict(files), step=self.state.global_step, **self._launch(), **about)
            publish(partial, run / partial.name)
            keep_last(run, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _launch(self) -> dict[str, int]:
        plugin = self.accelerator.state.deepspeed_plugin
        return {"processes": self.accelerator.num_processes, "zero_stage": 0 if plugin is None else plugin.zero_stage}

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write no card: only the final model has one (trainer/export.py)."""

    # ---- resuming -------------------------------------------------------------------------------------------------

    def own_settings(self) -> dict[str, Any]:
        """Return the settings of a training without a recipe, as plain data: the arguments of the trainer."""
        sampled = {} if self.sampler is None else self.sampler.described()
        given: Any = {"kind": getattr(self.args, "kind", None), **self.args.to_dict(), **sampled}
        adapters = {name: config.to_dict() for name, config in getattr(self.model, "peft_config", {}).items()}
        given |= {"launch": self._launch(), "lora": adapters, "thinking": getattr(self, "thinking", None)}
        text = json.dumps(given, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
        return json.loads(text)

    def own_inputs(self) -> dict[str, str]:
        """Return the fingerprints of the rows and of the models' files. Functions, as rewards, have none."""
        rows = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
        inputs = {f"rows of {name}": rows_fingerprint(part) for name, part in rows.items() if isinstance(part, Sized)}
        places = {"model": "" if self.sampler is None else self.sampler.place}
        if isinstance(teacher := getattr(self, "teacher", None), TeacherCache):
            places["teacher"] = str(teacher.folder / INDEX)
        elif teacher is not None:
            places["teacher"] = self.accelerator.unwrap_model(teacher).config._name_or_path
        for role, place in places.items():
            with suppress(HFValidationError, OSError):  # the directory of a module may be gone
                files = file_fingerprints(place, True) if place else {}
                inputs |= {f"{role}/{name}": value for name, value in files.items()}
        return inputs

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, or continue from a checkpoint: a directory, or True for the newest complete one in output_dir.

        Without a recipe, this checks what `sparse-rl train` checks: that no run in output_dir is overwritten or in use,
        that the checkpoint is complete, and that arguments, rows and model are those of the run that it continues.
        Raises UserError otherwise, on every process.
        """
        if self.recipe is not None:  # the command has checked the same
            return self._train_from(resume_from_checkpoint, *args, **kwargs)
        checkpoint: Any = None
        wrong, run, first = "", str(self.args.output_dir), self.is_world_process_zero()
        with locked(run) if first else nullcontext():
            if first:
                try:
                    self.inputs = self.own_inputs()
                    if resume_from_checkpoint:
                        which = "newest" if resume_from_checkpoint is True else str(resume_from_checkpoint)
                        checkpoint = str(checkpoint_to_resume(which, self.own_settings(), self.inputs))
                    else:
                        refuse_used(run)
                except UserError as error:
                    wrong = str(error).replace("--resume", "resume_from_checkpoint")
            checkpoint, wrong = broadcast_object_list([checkpoint, wrong])
            if wrong:
                raise UserError(wrong)
            return self._train_from(checkpoint, *args, **kwargs)

    def _train_from(self, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint if one is given. One of another launch is first converted (reshard.py)."""
        if self.is_world_process_zero():
            clear_partial(Path(self._get_output_dir(None)))
        if isinstance(checkpoint, str) and (Path(checkpoint) / MANIFEST).is_file():
            manifest, launch = read_manifest(Path(checkpoint)), self._launch()
            earlier = manifest["recipe"]
            if earlier and launch != {name: manifest[name] for name in launch}:
                checkpoint = self._copied = self._for_this_launch(checkpoint, earlier)
        return super().train(checkpoint, *args, **kwargs)

    def _for_this_launch(self, checkpoint: str, earlier: Mapping[str, Any]) -> str:
        """Return a copy of a checkpoint that was written under the recipe `earlier`; the first process makes it."""
        place = Path(self._get_output_dir(None)) / PARTIAL / Path(checkpoint).name
        if self.is_world_process_zero():
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                with reading(checkpoint):
                    settings = self.recipe or self.own_settings()
                    reshard(Path(checkpoint), place, Layout.of(earlier), Layout.of(settings))
            except UserError:
                remove(place)
                raise
        self.accelerator.wait_for_everyone()
        if (plugin := self.accelerator.state.deepspeed_plugin) is not None:
            plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
        return str(place)

    def _drop_copy(self) -> None:
        """Remove the copy, when all of it is loaded."""
        if self._copied is not None:
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                remove(Path(self._copied))
            self._copied = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        target: Any = self.model if model is None else model
        with reading(resume_from_checkpoint):
            if hasattr(target, "get_base_model") or not has_experts(target):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            else:  # transformers would find no weights of experts: files hold one tensor for each expert
                self._issue_warnings_after_load(load_weights(target, resume_from_checkpoint))
            if self.learned_policy is not None:
                read_scorers(resume_from_checkpoint, base_of(self.model))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise UserError for missing or unexpected weights, of which transformers only warns.

        A tied weight that was loaded by another name is not missing, and scorers have a file of their own.
        """
        model: Any = self.model
        weights, missing = dict(model.named_parameters(remove_duplicate=False)), set(load_result.missing_keys)
        loaded = {id(weight) for name, weight in weights.items() if name not in missing}
        lacking = {name for name in missing if id(weights.get(name)) not in loaded}
        differ = sorted(lacking - set(model._keys_to_ignore_on_save or ()) | set(load_result.unexpected_keys))
        if differ:
            more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
            raise UserError(f"the checkpoint and the model do not have the same weights: {differ[0]}{more}", "--resume")

    def _prepare_for_training(self, max_steps: int, dataloader: Any, checkpoint: str | None) -> Any:
        self._resumed = checkpoint
        with reading(checkpoint):  # loads the optimizer, the scheduler, and all of DeepSpeed's state
            prepared = super()._prepare_for_training(max_steps, dataloader, checkpoint)
            if self._copied is not None and (plugin := self.accelerator.state.deepspeed_plugin) is not None:
                del plugin.deepspeed_config["checkpoint"]
                settle(cast(Any, self).deepspeed.optimizer.optimizer, Path(self._copied))
            return prepared

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_rng_state(checkpoint)
        self._drop_copy()

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        places = super()._init_training_state(max_steps, *args)
        # Without this call, the checkpoint's intervals of logging and saving would apply.
        self.state.compute_steps(self.args, max_steps)
        return places

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch, but none if the resumed run had already ended: transformers would take one more step."""
        if self._ended or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            self._drop_copy()
        else:
            super()._run_epoch(*args, **kwargs)

    def _at_start(self) -> None:
        """Called before the first step, when transformers has restored weights, optimizer and trainer state."""
        run, checkpoint = Path(self._get_output_dir(None)), self._resumed
        if checkpoint is not None:
            file = Path(checkpoint) / STATE_FILE.format(rank=self.accelerator.process_index)
            if not file.is_file():
                wrong = "another trainer or fewer processes wrote this checkpoint"
                raise UserError(f"{checkpoint} has no {file.name}: {wrong}")
            with reading(checkpoint):
                self.load_extra_state(torch.load(file, weights_only=True, map_location="cpu"))
        else:
            self._initial = bit_sums(self._weights())
        if self.is_world_process_zero():
            for path in set_aside_later(run, self.state.global_step) if checkpoint is not None else ():
                logger.warning("a checkpoint after step %d was renamed to %s", self.state.global_step, path)
        problems = ((label, not_finite_weight(model.named_parameters())) for label, model in self.models().items())
        problem = next((f"{label} at the start is damaged, {wrong}" for label, wrong in problems if wrong), None)
        self._stop_at(next(filter(None, gather_object([problem])), None), "use an undamaged copy of the model")
