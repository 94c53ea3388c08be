"""The sampling of a training, from the values that a trainer is given: its start model, cache policy and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rollout.config import SAMPLE_LIVE, GRPORolloutConfig, RolloutConfig
from rollout.context.config import PromptCacheConfig, TrainedPromptCache
from rollout.context.engine import CompactingEngine
from rollout.context.reader import ContextPrompts
from rollout.engine import Engine, choose_engine, make_engine
from rollout.recorded import RecordedRollouts
from sparse_rl.attention import compute_exactly
from sparse_rl.config import Source, as_mapping, coerce
from sparse_rl.errors import UserError
from sparse_rl.experts import has_experts
from sparse_rl.models.directory import model_directory, saved_policy
from sparse_rl.models.load import base_of, load_tokenizer
from sparse_rl.policies.base import Policy
from sparse_rl.policies.make import make_policy
from trainer.arguments import outside_deepspeed
from trainer.config import check_sampled


@dataclass(frozen=True)
class SamplerSettings:
    """The settings of sampling in a training.

    place : directory or hub name of the start model; "" for a module that was not loaded from one
    policy : cache policy under which the training samples
    engine : the engine, if the caller has made one
    prompt_cache : settings for compacting contexts; None if the training compacts none
    """

    place: str
    policy: Policy
    rollout: RolloutConfig
    engine: Engine | RecordedRollouts | None
    prompt_cache: PromptCacheConfig | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        cache: Any,
        rollout: RolloutConfig | Mapping[str, Any] | None,
        engine: Engine | RecordedRollouts | None,
        args: Any,
        lora: bool,
        prompt_cache: PromptCacheConfig | Mapping[str, Any] | None = None,
    ) -> SamplerSettings:
        """Return the settings of sampling for a trainer's parameters. From here on this process computes as they say.

        model : the start model, a directory, a hub name or a module
        cache : the cache policy, as `make_policy` takes it; None means the policy saved with the model, or a full cache
        rollout : keys of the block `rollout` of a recipe; the engine is hf unless it is given
        engine : an engine made by the caller, which has a policy of its own; or None
        prompt_cache : keys of the block `prompt_cache` of a recipe; None compacts no context

        Raises UserError if a setting is wrong, or the training cannot sample under these settings.
        """
        place = model_directory(str(model)) if isinstance(model, (str, Path)) else _loaded_from(model)
        if engine is not None and cache is not None:
            raise UserError("the given engine has a policy of its own; remove cache", "cache")
        if isinstance(rollout, Mapping | None):
            rollout = {"engine": "hf", **(rollout or {})}
        if not isinstance(rollout, RolloutConfig):
            hint = GRPORolloutConfig if args.kind == "grpo" else RolloutConfig
            rollout = cast(RolloutConfig, coerce(rollout, hint, "rollout", Source()))
        if prompt_cache is not None and not isinstance(prompt_cache, PromptCacheConfig):
            prompt_cache = cast(PromptCacheConfig, coerce(prompt_cache, TrainedPromptCache, "prompt_cache", Source()))
        if engine is not None and prompt_cache is not None:
            raise UserError("contexts are compacted by an engine of the trainer's own; remove engine", "prompt_cache")
        if engine is not None:
            policy = engine.policy
        else:
            saved = saved_policy(place) if place and cache is None else None
            policy = make_policy(cache or saved or "full")
        optim = args.optim
        check_sampled(policy.config, rollout, args.scorers, lora=lora, optim=optim, prompt_cache=prompt_cache)
        if prompt_cache is not None:
            rollout = replace(rollout, engine="hf")  # the only engine that compacts contexts
        compute_exactly(rollout.exact)
        return cls(place, policy, rollout, engine, prompt_cache)

    def described(self) -> dict[str, Any]:
        """Return the settings as plain data, under the keys of a recipe."""
        compaction = None if self.prompt_cache is None else as_mapping(self.prompt_cache)
        cache, rollout = self.policy.config.as_block(), as_mapping(self.rollout)
        return {"model": self.place, "cache": cache, "prompt_cache": compaction, "rollout": rollout}

    def tokenizer(self) -> Any:
        """Return the tokenizer of the start model. Raises UserError if it has none."""
        if not self.place:
            raise UserError("the model was not loaded from a directory; give its tokenizer", "processing_class")
        return load_tokenizer(self.place)

    def open(
        self,
        live: Any,
        copied: Any,
        student: Any,
        args: Any,
        prompt: int | None,
        completion: int,
        about: ContextPrompts | None = None,
    ) -> Any:
        """Return the caller's engine, or make one.

        live : module, or directory, from which an engine samples that can sample from a live module
        copied : directory whose weights another engine loads
        prompt, completion : maximum numbers of tokens; None means unknown
        about : prompts about contexts, which `prompt_cache` needs
        """
        if self.engine is not None:
            return self.engine
        name = choose_engine(self.rollout, student.config, [self.policy.config])[0]
        rollout = replace(self.rollout, engine=name)
        options = {**rollout.arguments(args.dtype, prompt, completion), "progress": rollout.progress}
        with outside_deepspeed(args):
            if self.prompt_cache is not None:
                if about is None:
                    raise UserError("needs rows with a prompt and a context, or the parameter about", "prompt_cache")
                refuse_compacted_experts(student)
                return CompactingEngine(live, self.policy, prompt_cache=self.prompt_cache, about=about, **options)
            return make_engine(name, model=live if name in SAMPLE_LIVE else copied, policy=self.policy, **options)


def refuse_compacted_experts(model: Any) -> None:
    """Raise UserError if the model has experts, with which a training cannot compact contexts."""
    if has_experts(model):
        wrong = "the experts that read a compacted context are not recorded, so training cannot replay them"
        raise UserError(f"{wrong}; use a dense model", "prompt_cache")


def _loaded_from(model: Any) -> str:
    return getattr(getattr(base_of(model), "config", None), "_name_or_path", "")
