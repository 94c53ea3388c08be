"""`sparse-rl eval`: measure pass@1 of models over tasks and cache policies (see rollout/measure).

A completion is correct if and only if its accuracy reward is at least 1. Writes output_dir/eval.json (recipe, versions,
rows) and eval_completions.jsonl (every completion, right or wrong). The second file is the journal from which
`--resume` continues, and through which several processes share the work (rollout/measure/journal.py).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparse_rl.commands.arguments import add_continuing, add_recipe, read_recipe
from sparse_rl.commands.console import Session
from sparse_rl.commands.measurement import NOT_CHECKED, Measurement, measured, run_measurement
from sparse_rl.config import as_mapping
from sparse_rl.data.tokens import prompt_ends
from sparse_rl.errors import UserError, listed
from sparse_rl.metrics import RECIPE_FILE
from sparse_rl.recipe import EvalRecipe, Recipe, Run, list_recipes, load_recipe, make_recipe

if TYPE_CHECKING:
    from rollout.config import SamplingConfig
    from rollout.context.config import PromptCacheConfig
    from rollout.engine import Rollout
    from rollout.measure.accuracy import Task, TaskPoint
    from rollout.measure.journal import Journal
    from sparse_rl.policies.base import Policy

ABOUT = "Measure pass@1 of models over tasks and cache policies."
RESULTS, COMPLETIONS = FILES = "eval.json", "eval_completions.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "a YAML file or a name; or the directory of a run, to evaluate it on its held-out problems")
    add_continuing(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options, load=load_evaluation).expect(EvalRecipe)
    return run_measurement(Evaluation, options, session, recipe)


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
class Evaluation(Measurement):
    """The evaluation of one model, checked as far as possible before the model is loaded.

    tasks : name -> problems, and the functions that score their completions
    caches : cache policies or, for contexts that are compacted, the settings of the compactions
    """

    run: Run[EvalRecipe]
    tasks: Mapping[str, Task]
    caches: Sequence[Policy | PromptCacheConfig]
    sampling: SamplingConfig
    files = FILES
    not_checked = f"{NOT_CHECKED}; calls of the rewards"
    settings: ClassVar[dict[str, str]] = {"correct_if": "accuracy reward >= 1"}

    @classmethod
    def prepare(cls, recipe: EvalRecipe, model: Any = None) -> list[Evaluation]:
        """Check everything that can be checked without loading a model. Returns one evaluation for each model.

        model : module in memory to sample from; by default the recipe's models are loaded later
        """
        return [_prepare(one, model) for one in recipe.by_model()]

    @staticmethod
    def table(result: Any) -> Any:
        from sparse_rl.analysis.tables import accuracy_table

        return accuracy_table(result)

    def points(self, journal: Journal) -> list[TaskPoint]:
        """Return a point for every task and cache: all points of the first task, then those of the next.

        If contexts are compacted, the answers after a full context are the references of all points of the same task.
        """
        from rollout.measure.accuracy import TaskPoint

        caches, points = list(self.caches), []
        whole = next((i for i, cache in enumerate(caches) if getattr(cache, "keeps_all", False)), None)
        for name, task in self.tasks.items():
            make = partial(TaskPoint, name, self.run.recipe.model, task, self.sampling, journal)
            full = None if whole is None else make(caches[whole])
            points += [full if full and i == whole else make(cache, full) for i, cache in enumerate(caches)]
        return points

    def findings(self) -> dict[str, str]:
        sizes = {name: [len(prompt) for prompt in task.prompts] for name, task in self.tasks.items()}
        tasks = ", ".join(f"{name} {len(lengths)} (up to {max(lengths)} tokens)" for name, lengths in sizes.items())
        problems = sum(map(len, sizes.values()))
        count = problems * len(self.caches) * self.sampling.n
        product = f"{problems} problems x {len(self.caches)} caches x {self.sampling.n} samples"
        return {
            "problems": tasks,
            "completions": f"{product} = {count:,}, of up to {self.sampling.max_tokens:,} tokens",
        }

    def finish(
        self, points: Sequence[Any], folder: Path, journal: Journal, on_point: Callable[[], Any], progress: bool
    ) -> None:
        if not self.run.recipe.prompt_caches():
            return super().finish(points, folder, journal, on_point, progress)
        from rollout.measure.contexts import evaluate_contexts
        from sparse_rl.recipe import sampling

        engines = sampling.context_engines(self.run, folder, progress)
        return evaluate_contexts(points, engines, journal, on_point=on_point, progress=progress)


def _prepare(recipe: EvalRecipe, model: Any) -> Evaluation:
    from rollout.measure.accuracy import Task
    from rollout.measure.contexts import ContextTask
    from sparse_rl.data.problems import load_data
    from sparse_rl.recipe import sampling
    from sparse_rl.recipe.run import check_golds, rewards_of

    prepared = recipe.prepare(model)
    recipe, tokenizer = prepared.recipe, prepared.tokenizer
    rewards = [rewards_of([spec], key)[0][0] for key, spec in recipe.accuracies().items()]
    needed = [columns for reward in rewards if (columns := getattr(reward, "golds", ()))]
    tasks: dict[str, Any] = {}
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
    for name, data in recipe.tasks.items():
        answer = ("answer",) if ("answer",) in needed else ()
        room = prepared.room if recipe.prompt_cache is None else None
        problems = load_data(data, tokenizer, require=("prompt", *answer), where=f"tasks.{name}", room=room)
        for columns in needed:
            if not {*columns} & {*problems.column_names}:
                has = listed(problems.column_names, columns[0])
                wrong = f"the accuracy reward needs a column {' or '.join(map(repr, columns))}; the source has {has}"
                raise UserError(wrong, f"tasks.{name}")
        check_golds(rewards, problems, f"tasks.{name}")
        score, *further = (partial(_score, reward, problems, tokenizer) for reward in rewards)
        scores = score, dict(zip(recipe.further_accuracy, further, strict=True))
        rows = problems.to_list()
        of_tools = [recipe.tool_names(), recipe.tool_limits()] if recipe.uses_tools else []
        identity = sampling.identity(prepared, recipe.accuracies(), as_mapping(data), rows, *of_tools)
        if recipe.prompt_cache is None:
            talks = sampling.tool_use(
                prepared, data, rows, sum(spec != "environment" for spec in recipe.accuracies().values())
            )
            prompts = talks.prompts() if talks else sampling.prompt_tokens(problems, tokenizer, data)
            tasks[name] = Task(prompts, decode, *scores, identity, talks.converse if talks else None)
        else:
            questions = sampling.context_questions(problems, tokenizer, data)
            rest = [prompt.rest for prompt in questions.prompts]
            tasks[name] = ContextTask(rest, decode, *scores, identity, questions=questions)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    sampled = replace(recipe.sampling(recipe.samples), **recipe.forcing(encode))
    return Evaluation(prepared, tasks, recipe.prompt_caches() or prepared.policies, sampled)


evaluate = partial(measured, Evaluation)  # with model=, samples from a module in memory


def _score(
    reward: Any,
    dataset: Any,
    tokenizer: Any,
    places: Sequence[int],
    texts: Sequence[Any],
    rollouts: Sequence[Rollout],
    environments: Sequence[Any] = (),
) -> list[float | None]:
    """Return each completion's score, from a reward function that is called as in training.

    places : index in the dataset of each completion's problem
    texts : text of each completion, or the messages of each conversation
    """
    problems = [dataset[place] for place in places]
    completions = list(texts)
    if not isinstance(problems[0]["prompt"], str) and isinstance(texts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: [p[name] for p in problems] for name in problems[0] if name not in ("prompt", "completion")}
    return reward(
        prompts=[p["prompt"] for p in problems],
        prompt_ends=prompt_ends([r.prompt_ids for r in rollouts], tokenizer),
        completions=completions,
        completion_ids=[r.completion_ids for r in rollouts],
        trainer_state=None,
        log_metric=lambda *_: None,
        log_extra=lambda *_: None,
        **({"environments": list(environments)} if environments else {}),
        **columns,
    )
