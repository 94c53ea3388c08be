"""Sampling from a recipe: its model, cache, prompts and sampling parameters, as `rollout` and `eval` need them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.errors import UserError
from sparse_rl.recipe import DataConfig, EvalRecipe, GRPORecipe, Recipe

if TYPE_CHECKING:
    from rollout import Engine, Rollout, SamplingConfig
    from sparse_rl.policies import Policy


def sample(recipe: GRPORecipe | EvalRecipe, folder: Path, problems: int = 8) -> list[dict[str, Any]]:
    """Sample the recipe's first problems under its cache into `folder`; returns the `facts` of each rollout.

    Part by part, so that any number fits: completions.jsonl, and of each part a file traces-00000.safetensors, whose
    traces follow its lines. A full cache has no evictions, and no files of traces.
    """
    from sparse_rl.data.problems import load_data
    from sparse_rl.engines import settle_engine
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
    recipe = settle_engine(recipe, config)
    source = load_data(data, tokenizer, where=where)
    source = source.select(range(min(problems, len(source))))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}", "--out") from error
    sampling = sampling_of(recipe, count)
    made_by = {"model": model_fingerprint(config), "policy": fingerprint(policy)}
    found: list[dict[str, Any]] = []
    opened = engines(recipe, progress=recipe.rollout.progress)
    with opened(policy) as engine, (folder / "completions.jsonl").open("w") as log:
        for old in folder.glob("traces-*.safetensors"):  # of an earlier call
            old.unlink()
        known = [name for name in ("prompt", "answer") if name in source.column_names]
        parts = sampled(engine, source, tokenizer, data, sampling)
        for number, (indices, part, _) in enumerate(parts):
            if policy.schedule.evicts:
                save_traces(folder / f"traces-{number:05d}.safetensors", [r.trace for r in part], made_by)
            texts = tokenizer.batch_decode([r.completion_ids for r in part], skip_special_tokens=True)
            problems_of = [{name: source[i][name] for name in known} for i in indices for _ in range(count)]
            for problem, text, rollout in zip(problems_of, texts, part, strict=True):
                found.append(facts(rollout))
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
    from rollout import SamplingConfig

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
    from rollout import make_engine
    from sparse_rl.engines import engine_options

    if recipe.rollout.engine == "hf" and model is None:
        model = load_model(recipe)
    source = recipe.model if model is None else model

    @contextmanager
    def opened(policy: Policy) -> Iterator[Engine]:
        options = {**engine_options(recipe), "progress": progress}
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


def sampled(
    engine: Engine, data: Any, tokenizer: Any, config: DataConfig, sampling: SamplingConfig
) -> Iterator[tuple[list[int], list[Rollout], float]]:
    """(problems, their rollouts, seconds) in parts of a few full batches, so that traces need not all be held.

    Equal prompts stay in one part: the engine tells their samples apart only within one call.
    """
    from sparse_rl.data.tokens import prompt_ids

    groups: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(data["prompt"]):
        ids = tuple(prompt_ids(prompt, tokenizer, config.thinking))
        if not ids:
            raise UserError(f"the prompt of problem {i + 1} has no tokens; drop it")
        groups.setdefault(ids, []).append(i)
    size = math.lcm(sampling.n, engine.max_batch) // sampling.n
    part: list[tuple[int, tuple[int, ...]]] = []
    for number, (ids, indices) in enumerate(groups.items(), start=1):
        part += [(i, ids) for i in indices]
        if len(part) >= size or number == len(groups):
            start = time.perf_counter()
            rollouts = engine.generate([list(ids) for _, ids in part], sampling)
            yield [i for i, _ in part], rollouts, time.perf_counter() - start
            part = []


def facts(rollout: Rollout) -> dict[str, Any]:
    return {
        "finish_reason": rollout.finish_reason,
        "tokens": len(rollout.completion_ids),
        "retention": rollout.trace.retention(),
        "mean_logprob": sum(rollout.logprobs) / len(rollout.logprobs),
    }
