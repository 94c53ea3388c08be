"""`sparse-rl eval`: measure pass@1 of models over tasks and cache policies (see rollout/evaluation).

A completion is correct if and only if its accuracy reward is at least 1. Writes output_dir/eval.json (recipe, versions,
rows) and eval_completions.jsonl (every completion, right or wrong). The second file is the journal from which
`--resume` continues, and through which several processes share the work (rollout/evaluation/journal.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import add_continuing, add_recipe, print_findings, read_recipe, refuse_used
from sparse_rl.commands.console import Session, print_table, quiet_loading, say
from sparse_rl.config import as_mapping
from sparse_rl.errors import UserError, listed
from sparse_rl.files import replace_text
from sparse_rl.metrics import RECIPE_FILE
from sparse_rl.progress import stage
from sparse_rl.recipe import EvalRecipe, Recipe, list_recipes, load_recipe, make_recipe

if TYPE_CHECKING:
    from rollout.config import SamplingConfig
    from rollout.context.config import PromptCacheConfig
    from rollout.engine import Rollout
    from rollout.evaluation.evaluate import EvalRow, Point, Task
    from rollout.evaluation.journal import Journal
    from sparse_rl.commands.prepared import Prepared
    from sparse_rl.policies.base import Policy

ABOUT = "Measure pass@1 of models over tasks and cache policies."
FORMAT_VERSION = 1
RESULTS, COMPLETIONS = "eval.json", "eval_completions.jsonl"
NOT_CHECKED = "the values of the weights; memory (sparse-rl doctor RECIPE); calls of the rewards"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "a YAML file or a name; or the directory of a run, to evaluate it on its held-out problems")
    add_continuing(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.analysis.evaluation import accuracy_table

    recipe = read_recipe(options, load=load_evaluation).expect(EvalRecipe)
    refuse_used(
        Path(recipe.output_dir),
        (RESULTS, COMPLETIONS),
        "output_dir",
        options.overwrite or options.resume,
        resumable=True,
    )
    quiet_loading(session.verbose)
    if options.dry_run:
        for evaluation in prepare_evaluations(recipe):
            print_findings(evaluation.findings(), NOT_CHECKED)
        return 0
    session.folder = Path(recipe.output_dir)
    rows = evaluate(recipe, progress=recipe.rollout.progress, resume=options.resume)
    if rows:
        print_table(accuracy_table(rows))
    tell_unfinished(recipe.count_points() - len(rows))
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


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one model, checked as far as possible before the model is loaded.

    tasks : name -> problems, and the functions that score their completions
    caches : cache policies or, for contexts that are compacted, the settings of the compactions
    """

    prepared: Prepared[EvalRecipe]
    tasks: Mapping[str, Task]
    caches: Sequence[Policy | PromptCacheConfig]
    sampling: SamplingConfig

    def points(self, journal: Journal) -> list[Point]:
        """Return a point for every task and cache: all points of the first task, then those of the next.

        If contexts are compacted, the answers after a full context are the references of all points of the same task.
        """
        from rollout.evaluation.evaluate import Point

        caches, points = list(self.caches), []
        whole = next((i for i, cache in enumerate(caches) if getattr(cache, "keeps_all", False)), None)
        for name, task in self.tasks.items():
            make = partial(Point, name, self.prepared.recipe.model, task, self.sampling, journal)
            full = None if whole is None else make(caches[whole])
            points += [full if full and i == whole else make(cache, full) for i, cache in enumerate(caches)]
        return points

    def findings(self) -> dict[str, str]:
        """Return topic -> text: the lines that --dry-run prints."""
        sizes = {name: [len(prompt) for prompt in task.prompts] for name, task in self.tasks.items()}
        tasks = ", ".join(f"{name} {len(lengths)} (up to {max(lengths)} tokens)" for name, lengths in sizes.items())
        problems = sum(map(len, sizes.values()))
        count = problems * len(self.caches) * self.sampling.n
        product = f"{problems} problems x {len(self.caches)} caches x {self.sampling.n} samples"
        recipe = self.prepared.recipe
        return {
            "recipe": f"{recipe.kind}, into {recipe.output_dir}",
            **self.prepared.findings,
            "problems": tasks,
            "completions": f"{product} = {count:,}, of up to {self.sampling.max_tokens:,} tokens",
        }


def prepare_evaluations(recipe: EvalRecipe, model: Any = None) -> list[Evaluation]:
    """Check everything that can be checked without loading a model. Returns one evaluation for each model.

    model : module in memory to sample from; by default the recipe's models are loaded later
    """
    return [_prepare(one, model) for one in recipe.by_model()]


def _prepare(recipe: EvalRecipe, model: Any) -> Evaluation:
    from rollout.evaluation.contexts import ContextTask
    from rollout.evaluation.evaluate import Task
    from sparse_rl.commands import sampling
    from sparse_rl.commands.prepared import prepare, rewards_of
    from sparse_rl.data.problems import load_data

    prepared = prepare(recipe, model)
    recipe, tokenizer = prepared.recipe, prepared.tokenizer
    rewards = {key: rewards_of([spec], key)[0][0] for key, spec in recipe.accuracies().items()}
    needed = [columns for spec in recipe.accuracies().values() if (columns := _needed_columns(spec))]
    tasks: dict[str, Any] = {}
    for name, data in recipe.tasks.items():
        answer = ("answer",) if ("answer",) in needed else ()
        problems = load_data(data, tokenizer, require=("prompt", *answer), where=f"tasks.{name}")
        for columns in needed:
            if not {*columns} & {*problems.column_names}:
                has = listed(problems.column_names, columns[0])
                wrong = f"the accuracy reward needs a column {' or '.join(map(repr, columns))}; the source has {has}"
                raise UserError(wrong, f"tasks.{name}")
        score, *further = (partial(_score, reward, key, problems) for key, reward in rewards.items())
        scores = score, dict(zip(recipe.further_accuracy, further, strict=True))
        identity = sampling.identity(prepared, recipe.accuracies(), as_mapping(data), problems.to_list())
        if recipe.prompt_cache is None:
            prompts = sampling.prompt_tokens(problems, tokenizer, data, prepared.room, f"tasks.{name}")
            tasks[name] = Task(prompts, *scores, identity)
        else:
            questions = sampling.context_questions(problems, tokenizer, data)
            rest = [prompt.rest for prompt in questions.prompts]
            tasks[name] = ContextTask(rest, *scores, identity, questions=questions)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    sampled = replace(recipe.sampling(recipe.samples), **recipe.forcing(encode))
    return Evaluation(prepared, tasks, recipe.prompt_caches() or prepared.policies, sampled)


def evaluate(recipe: EvalRecipe, model: Any = None, progress: bool = True, resume: bool = False) -> list[EvalRow]:
    """Evaluate, write the rows to the recipe's output_dir, and return them: one row per model, task and cache, in this
    order. A row is missing if another process still works on its results.

    model : module in memory to sample from; by default the recipe's models are loaded
    resume : True keeps the completions that earlier calls sampled

    Raises UserError for errors that the user can fix, if possible before a model is loaded.
    """
    with stage("loading", recipe.model, shown=progress):
        from rollout.evaluation.contexts import evaluate_contexts
        from rollout.evaluation.evaluate import evaluate as evaluate_points
        from rollout.evaluation.journal import Journal
        from sparse_rl.commands import sampling
        from trainer import rundir

        evaluations = prepare_evaluations(recipe, model)
        for evaluation in evaluations:
            say("rollouts", evaluation.prepared.findings["rollouts"])
        folder = rundir.prepare(recipe.output_dir, recipe.as_yaml())
    with Journal(folder / COMPLETIONS, resume=resume) as journal:
        points = [evaluation.points(journal) for evaluation in evaluations]
        in_order = [point for points_of_model in points for point in points_of_model]
        write = partial(write_results, folder / RESULTS, recipe, journal, in_order, correct_if="accuracy reward >= 1")
        for evaluation, points_of_model in zip(evaluations, points, strict=True):
            prepared = evaluation.prepared
            decode = partial(prepared.tokenizer.batch_decode, skip_special_tokens=True)
            options: dict[str, Any] = {"on_point": write, "progress": progress}
            if all(point.complete for point in points_of_model):
                continue
            if recipe.prompt_caches():
                engines = sampling.context_engines(prepared, folder, progress)
                evaluate_contexts(points_of_model, engines, decode, journal, **options)
            else:
                evaluate_points(points_of_model, sampling.engines(prepared, progress), decode, journal, **options)
        return write()


def write_results(file: Path, recipe: Recipe, journal: Journal, points: Sequence[Any], **more: str) -> list[Any]:
    """Write {format_version, recipe, versions, seed, **more, rows} as JSON, with the rows of all complete points.

    Returns the rows. Only one process at a time writes, so the file of the last call has the rows of all processes.
    """
    versions = json.loads((file.parent / "environment.json").read_text())
    with journal.writing():
        journal.refresh()
        rows = [point.row() for point in points if point.complete]
        content = {
            "format_version": FORMAT_VERSION,
            "recipe": recipe.resolved(),
            "versions": versions,
            "seed": recipe.seed,
            **more,
            "rows": [{**dataclasses.asdict(row), "budget": row.budget} for row in rows],
        }
        replace_text(file, json.dumps(content, indent=2) + "\n")
    return rows


def tell_unfinished(points: int) -> None:
    """Tell the user that other processes still work on the results of `points` rows."""
    if points:
        say("unfinished", f"other processes still work on {points} rows; the last process writes these rows")


def _needed_columns(spec: Any) -> tuple[str, ...]:
    """Return the dataset columns of which a built-in reward needs one; empty if the reward needs none."""
    name = spec if isinstance(spec, str) else spec.get("name")
    if name == "code":
        return ("tests", "private_test_cases", "public_test_cases")
    return {"short_answer": ("answers",)}.get(name, ("answer",) if name in ("math", "boxed", "letter") else ())


def _score(
    reward: Any, key: str, dataset: Any, places: Sequence[int], texts: Sequence[str], rollouts: Sequence[Rollout]
) -> list[float | None]:
    """Return each completion's score, from a reward function that is called as in training.

    key : recipe key that names the reward
    places : index in the dataset of each completion's problem
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
