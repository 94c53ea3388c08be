"""Sampling from a recipe: its model, cache, prompts and sampling parameters, as `rollout` and `eval` need them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.recipe import EvalRecipe, GRPORecipe, Recipe

if TYPE_CHECKING:
    from rollout.config import SamplingConfig
    from rollout.engine import Engine
    from sparse_rl.policies import Policy


def sample(recipe: GRPORecipe | EvalRecipe, folder: Path, problems: int = 8) -> list[dict[str, Any]]:
    """Sample the recipe's first problems under its cache into `folder`; returns the `summary` of each rollout.

    Part by part, so that any number fits: completions.jsonl, and of each part a file traces-00000.safetensors, whose
    traces follow its lines. A full cache has no evictions, and no files of traces.
    """
    from rollout.choice import with_chosen_engine
    from rollout.evaluation.samples import sample_in_parts, summary
    from sparse_rl.data.problems import load_data
    from sparse_rl.models.load import load_config, load_tokenizer, model_fingerprint
    from sparse_rl.policies import fingerprint, make_policy
    from sparse_rl.trace import save_traces

    if isinstance(recipe, EvalRecipe):
        policy, count = eval_policies(recipe)[0], recipe.samples
        name, data = next(iter(recipe.tasks.items()))
        where = f"tasks.{name}"
    else:
        policy, count, data, where = make_policy(recipe.cache), recipe.num_generations, recipe.data, "data"
    config, tokenizer = load_config(recipe.model), load_tokenizer(recipe.model)
    recipe = replace(recipe, rollout=with_chosen_engine(recipe.rollout, config))
    source = load_data(data, tokenizer, where=where)
    source = source.select(range(min(problems, len(source))))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}", "--out") from error
    sampling, prompts = sampling_of(recipe, count), prompt_tokens(source, tokenizer, data)
    made_by = {"model": model_fingerprint(config), "policy": fingerprint(policy)}
    found: list[dict[str, Any]] = []
    opened = engines(recipe, progress=recipe.rollout.progress)
    with opened(policy) as engine, (folder / "completions.jsonl").open("w") as log:
        for old in folder.glob("traces-*.safetensors"):  # of an earlier call
            old.unlink()
        known = [name for name in ("prompt", "answer") if name in source.column_names]
        parts = sample_in_parts(engine, prompts, sampling)
        for number, (indices, part, _) in enumerate(parts):
            if policy.schedule.evicts:
                save_traces(folder / f"traces-{number:05d}.safetensors", [r.trace for r in part], made_by)
            texts = tokenizer.batch_decode([r.completion_ids for r in part], skip_special_tokens=True)
            problems_of = [{name: source[i][name] for name in known} for i in indices for _ in range(count)]
            for problem, text, rollout in zip(problems_of, texts, part, strict=True):
                found.append(summary(rollout))
                log.write(json.dumps({**problem, "completion": text, **found[-1]}) + "\n")
            log.flush()
    return found


def eval_policies(recipe: EvalRecipe) -> list[Policy]:
    """The caches of a recipe; where it names none, the one that the model's directory carries, or the full cache."""
    from sparse_rl.models.directory import saved_policy
    from sparse_rl.models.load import load_config
    from sparse_rl.policies import make_policy

    load_config(recipe.model)
    blocks = recipe.caches()
    return [make_policy(saved_policy(recipe.model) or "full" if block is None else block) for block in blocks]


def sampling_of(recipe: GRPORecipe | EvalRecipe, n: int) -> SamplingConfig:
    from rollout.config import SamplingConfig

    return SamplingConfig(
        max_tokens=recipe.max_completion_length,
        temperature=recipe.temperature,
        top_p=recipe.top_p,
        top_k=recipe.top_k,
        n=n,
        seed=recipe.seed,
    )


def engines(
    recipe: GRPORecipe | EvalRecipe, model: Any = None, progress: bool = False
) -> Callable[[Policy], AbstractContextManager[Engine]]:
    """policy -> a context with the engine of a recipe (whose engine is settled) under it, closed at its end.

    hf samples from one module for all policies: `model`, or the recipe's, loaded here. vllm loads its own for each.
    """
    from rollout.make import make_engine
    from sparse_rl.engines import recipe_engine_options

    if recipe.rollout.engine == "hf" and model is None:
        model = load_model(recipe)
    source = recipe.model if model is None else model

    @contextmanager
    def opened(policy: Policy) -> Iterator[Engine]:
        options = {**recipe_engine_options(recipe), "progress": progress}
        engine = make_engine(recipe.rollout.engine, model=source, policy=policy, **options)
        try:
            yield engine
        finally:
            engine.close()

    return opened


def load_model(recipe: Recipe) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=getattr(torch, recipe.dtype))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the weights of {recipe.model} cannot be read: {str(error).splitlines()[0]}", "model"
        ) from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval()  # type: ignore[arg-type]  # a decorator hides the signature


def prompt_tokens(data: Any, tokenizer: Any, config: DataConfig) -> list[list[int]]:
    """The prompts of a dataset as the model is given them."""
    from sparse_rl.data.tokens import prompt_ids

    prompts = [prompt_ids(prompt, tokenizer, config.thinking) for prompt in data["prompt"]]
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"the prompt of problem {i + 1} has no tokens; drop it")
    return prompts
