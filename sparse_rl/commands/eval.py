"""`sparse-rl eval`: measure pass@1 of a model over tasks, cache policies and budgets (see rollout/evaluation).

A completion is correct if and only if its accuracy reward is at least 1. Writes output_dir/eval.json (recipe, versions,
rows) and eval_completions.jsonl (every completion, right or wrong).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import add_overwrite, add_recipe, read_recipe, refuse_used
from sparse_rl.commands.console import Session, print_table, quiet_loading, say
from sparse_rl.errors import UserError, listed
from sparse_rl.metrics import RECIPE_FILE
from sparse_rl.progress import stage
from sparse_rl.recipe import EvalRecipe, Recipe, list_recipes, load_recipe, make_recipe

if TYPE_CHECKING:
    from rollout.engine import Rollout
    from rollout.evaluation.evaluate import EvalRow
    from rollout.evaluation.perplexity import PerplexityRow

ABOUT = "Measure pass@1 of a model over tasks, cache policies and budgets."
FORMAT_VERSION = 1
RESULTS, COMPLETIONS = "eval.json", "eval_completions.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "a YAML file or a name; or the directory of a run, to evaluate it on its held-out problems")
    add_overwrite(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.analysis.evaluation import accuracy_table

    recipe = read_recipe(options, load=load_evaluation).expect(EvalRecipe)
    refuse_used(Path(recipe.output_dir), (RESULTS, COMPLETIONS), "output_dir", options.overwrite)
    session.folder = Path(recipe.output_dir)
    quiet_loading(session.verbose)
    print_table(accuracy_table(evaluate(recipe, progress=recipe.rollout.progress)))
    print(Path(recipe.output_dir) / RESULTS)
    return 0


def load_evaluation(name: str, overrides: list[str]) -> Recipe:
    """Load a recipe by name. For the directory of a run, return the evaluation that the run's recipe defines."""
    folder = Path(name)
    if name in list_recipes() or not folder.is_dir():
        return load_recipe(name, overrides)
    saved = folder / RECIPE_FILE
    questions = load_recipe(saved).evaluation(name) if saved.is_file() else None
    if questions is None:
        write = f"sparse-rl eval RECIPE model={shlex.quote(name)}"
        raise UserError(f"{name} does not define the problems to evaluate; use a recipe of kind eval: {write}")
    return make_recipe(questions, overrides, name)


def evaluate(recipe: EvalRecipe, model: Any = None, progress: bool = True) -> list[EvalRow]:
    """Evaluate, write the rows to the recipe's output_dir, and return them: one per task and cache point, task by task.

    model : module in memory to sample from; by default the recipe's model is loaded

    Raises UserError for errors that the user can fix, if possible before the model is loaded.
    """
    with stage("loading", recipe.model, shown=progress):
        from rollout.evaluation.contexts import ContextTask, evaluate_contexts
        from rollout.evaluation.evaluate import Task
        from rollout.evaluation.evaluate import evaluate as evaluate_tasks
        from sparse_rl.commands import sampling
        from sparse_rl.commands.prepared import prepare, rewards_of
        from sparse_rl.data.problems import load_data
        from trainer import rundir

        prepared = prepare(recipe, model)
        recipe, tokenizer = prepared.recipe, prepared.tokenizer
        say("rollouts", prepared.findings["rollouts"])
        rewards = {key: rewards_of([spec], key)[0][0] for key, spec in recipe.accuracies().items()}
        needed = {column for spec in recipe.accuracies().values() if (column := _needed_column(spec))}
        tasks: dict[str, Any] = {}
        for name, data in recipe.tasks.items():
            problems = load_data(data, tokenizer, require=("prompt", *needed & {"answer"}), where=f"tasks.{name}")
            if missing := sorted(needed - {*problems.column_names}):
                has = listed(problems.column_names, missing[0])
                raise UserError(
                    f"the accuracy reward needs a column {missing[0]!r}; the source has {has}", f"tasks.{name}"
                )
            score, *further = (partial(_score, reward, key, problems) for key, reward in rewards.items())
            scores = score, dict(zip(recipe.further_accuracy, further, strict=True))
            if recipe.prompt_cache is None:
                prompts = sampling.prompt_tokens(problems, tokenizer, data, prepared.room, f"tasks.{name}")
                tasks[name] = Task(prompts, *scores)
            else:
                questions = sampling.context_questions(problems, tokenizer, data)
                tasks[name] = ContextTask([prompt.rest for prompt in questions.prompts], *scores, questions=questions)
        sampled = replace(
            recipe.sampling(recipe.samples), **recipe.forcing(partial(tokenizer.encode, add_special_tokens=False))
        )
        folder = rundir.prepare(recipe.output_dir, recipe.as_yaml())
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
    with (folder / COMPLETIONS).open("w") as log:
        callbacks: dict[str, Any] = {
            "on_completion": lambda line: print(json.dumps(line), file=log),
            "on_row": partial(write_results, folder / RESULTS, recipe, correct_if="accuracy reward >= 1"),
            "progress": progress,
        }
        if caches := recipe.prompt_caches():
            engines = sampling.context_engines(prepared, folder, progress)
            return evaluate_contexts(tasks, caches, sampled, engines, decode, **callbacks)
        opened = sampling.engines(prepared, progress)
        return evaluate_tasks(tasks, prepared.policies, sampled, opened, decode, **callbacks)


def write_results(file: Path, recipe: Recipe, rows: Sequence[EvalRow | PerplexityRow], **more: str) -> None:
    """Write eval.json: {format_version, recipe, versions, seed, correct_if, rows}.

    The file is rewritten after every cache point.

    more : additional entries, such as correct_if
    """
    versions = json.loads((file.parent / "environment.json").read_text())
    content = {
        "format_version": FORMAT_VERSION,
        "recipe": recipe.resolved(),
        "versions": versions,
        "seed": recipe.seed,
        **more,
        "rows": [{**dataclasses.asdict(row), "budget": row.budget} for row in rows],
    }
    file.write_text(json.dumps(content, indent=2) + "\n")


def _needed_column(spec: Any) -> str | None:
    """Return the dataset column that a built-in reward needs to score a completion; None if the reward needs none."""
    name = spec if isinstance(spec, str) else spec.get("name")
    return {"math": "answer", "boxed": "answer", "short_answer": "answers"}.get(name)


def _score(
    reward: Any, key: str, dataset: Any, places: Sequence[int], texts: Sequence[str], rollouts: Sequence[Rollout]
) -> list[float | None]:
    """Return the score of each completion, from a reward function that is called as in training.

    key : recipe key that names the reward
    places : index in the dataset of each completion's problem
    texts, rollouts : text and rollout of each completion
    """
    problems = [dataset[place] for place in places]
    chat = not isinstance(problems[0]["prompt"], str)
    completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else list(texts)
    columns = {name: [p[name] for p in problems] for name in problems[0] if name not in ("prompt", "completion")}
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        scores = reward(
            prompts=[p["prompt"] for p in problems],
            completions=completions,
            completion_ids=[r.completion_ids for r in rollouts],
            trainer_state=None,
            log_metric=lambda *_: None,
            log_extra=lambda *_: None,
            **columns,
        )
        if inspect.isawaitable(scores):
            raise TypeError("asynchronous rewards are not supported here")
        scores = [None if score is None else float(score) for score in scores]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code, which may call sys.exit
        raise UserError(f"{name} raised {type(error).__name__}: {error}", key) from error
    if len(scores) != len(texts):
        raise UserError(f"{name} returned {len(scores)} values for {len(texts)} completions", key)
    return scores
