"""Evaluation behind compacted contexts: pass@1 over tasks × prompt caches (rollout/context).

Problems are taken by their contexts. Each context is prefilled, and its reference queries are found, once for all
compactions that use the same ones; behind each compaction all questions about the context are asked. Beside that it is
an evaluation like any other (evaluate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rollout.config import SamplingConfig
from rollout.context import Context, PromptCacheConfig
from rollout.context.files import load_context, save_context
from rollout.evaluation.evaluate import ContextCosts, Decode, EvalRow, Line, Point, Task
from rollout.evaluation.samples import sample_in_parts
from sparse_rl.data.tokens import SplitPrompt
from sparse_rl.errors import UserError
from sparse_rl.progress import stage

if TYPE_CHECKING:
    from rollout.hf import HFEngine

# The settings of the compaction alone: configurations that differ in no others share one reading of a context.
COMPACTION = {"policy", "ratio", "select", "aggregate", "pool", "ridge", "fit", "layers", "budgets", "chunk"}


@dataclass(frozen=True)
class Questions:
    """The prompts of problems, cut behind their contexts.

    study : token ids of what self-study asks behind each context
    """

    prompts: Sequence[SplitPrompt]
    study: Sequence[Sequence[int]]


@dataclass(frozen=True)
class ContextTask(Task):
    """A task whose problems have contexts; `prompts` are what follows them."""

    questions: Questions = field(kw_only=True)


@dataclass(frozen=True)
class Compacted:
    """A context after one of the compactions.

    cache : which of the settings made it
    problems : the places of those that ask about it
    """

    cache: int
    problems: list[int]
    context: Context
    costs: ContextCosts


def compacted_contexts(
    engine: HFEngine,
    questions: Questions,
    caches: Sequence[PromptCacheConfig],
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Iterator[Compacted]:
    """Every context of these problems under every one of `caches`, context by context.

    caches : `first` and `last` of each count the tokens of the context's text
    on_stage : is told, in words, what begins

    Raises UserError, with the number of a problem, where a context cannot be compacted as the settings say.
    """
    problems_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for place, prompt in enumerate(questions.prompts):
        problems_of.setdefault((prompt.first, tuple(prompt.context)), []).append(place)
    for number, ((first, tokens), problems) in enumerate(problems_of.items(), start=1):
        where = f"context {number} of {len(problems_of)}"
        told = partial(_tell, on_stage, f"{where}: {len(tokens)} tokens")
        waiting = {place: replace(cache, first=cache.first + first) for place, cache in enumerate(caches)}
        while waiting:
            alike = _read_alike(waiting)
            try:
                studied = engine.study(tokens, waiting[alike[0]], questions.study, told)
                for place in alike:
                    config = waiting.pop(place)
                    on_stage(f"{where}: compaction, {label(config)}")
                    context = studied.compacted(config)
                    sizes = len(context.tokens), context.nbytes, studied.whole.nbytes
                    yield Compacted(place, problems, context, ContextCosts(1, *sizes, context.seconds))
                    del context
                del studied  # before the next is made
            except UserError as error:
                raise UserError(f"problem {problems[0] + 1}: {error.message}", "prompt_cache") from error


def _tell(on_stage: Callable[[str], None], what: str, begins: str) -> None:
    on_stage(f"{what}, {begins}")


def _read_alike(configs: Mapping[int, PromptCacheConfig]) -> list[int]:
    """The places of the configurations that one reading of a context serves: first the one by whose settings it is
    read, then those with the same settings of the reading, and those that need no reference queries.
    """

    def reading(config: PromptCacheConfig) -> dict[str, Any]:
        return {name: value for name, value in asdict(config).items() if name not in COMPACTION}

    lead = next((place for place, config in configs.items() if config.chooses), next(iter(configs)))
    rest = (at for at, one in configs.items() if not one.chooses or reading(one) == reading(configs[lead]))
    return [lead, *(at for at in rest if at != lead)]


@dataclass(frozen=True)
class ContextEngines:
    """Which engine compacts contexts, and which goes on from them: hf does both; for vllm, hf compacts first, into
    files, so that the two are never loaded at once.

    answering : opens the engine that samples, for a `with`; where another compacts, it is given `context_entries`
    compacting : opens that other engine; None: there is none
    folder : where the files lie meanwhile
    window : the most tokens that the model reads; None: not known
    """

    answering: Callable[..., AbstractContextManager[Any]]
    compacting: Callable[[], AbstractContextManager[Any]] | None
    folder: Path
    window: int | None = None

    @contextmanager
    def opened(
        self,
        questions: Mapping[str, Questions],
        caches: Sequence[PromptCacheConfig],
        answer: int,
        on_stage: Callable[[str, str], None],
    ) -> Iterator[tuple[Any, Callable[[str], Iterator[Compacted]]]]:
        """The engine that samples, and: task -> its contexts under every one of `caches`, context by context.

        answer : the most tokens that are sampled behind a question
        on_stage : is told what begins: the task, and in words what
        """

        for name, asked in questions.items():
            for place, prompt in enumerate(asked.prompts):
                tokens = len(prompt.context) + len(prompt.rest)
                if self.window is not None and tokens + answer > self.window:
                    wrong = f"problem {place + 1} has {tokens} tokens, with {answer} of an answer more than the"
                    mend = "lower max_prompt_tokens or max_completion_length"
                    raise UserError(f"{wrong} {self.window} that the model reads; {mend}", f"tasks.{name}")

        def made(engine: Any, name: str) -> Iterator[Compacted]:
            return compacted_contexts(engine, questions[name], caches, partial(on_stage, name))

        if self.compacting is None:
            with self.answering() as engine:
                yield engine, partial(made, engine)
            return
        with TemporaryDirectory(prefix="contexts-", dir=self.folder) as folder:
            stored: dict[str, list[tuple[Path, dict[str, Any]]]] = {name: [] for name in questions}
            most = 0
            with self.compacting() as engine:
                every = ((name, one) for name in questions for one in made(engine, name))
                for number, (name, one) in enumerate(every):
                    file = Path(folder) / f"{number:05d}.safetensors"
                    save_context(file, one.context)
                    longest = max(len(questions[name].prompts[place].rest) for place in one.problems)
                    most = max(most, one.context.entries + longest + answer)
                    stored[name].append((file, {"cache": one.cache, "problems": one.problems, "costs": one.costs}))
                    del one
                del engine
            with self.answering(context_entries=most) as engine:
                yield engine, lambda name: (Compacted(context=load_context(f), **rest) for f, rest in stored[name])


def evaluate_contexts(
    tasks: Mapping[str, ContextTask],
    caches: Sequence[PromptCacheConfig],
    sampling: SamplingConfig,
    engines: ContextEngines,
    decode: Decode,
    *,
    on_completion: Callable[[Line], None],
    on_row: Callable[[list[EvalRow]], None],
    progress: bool = True,
) -> list[EvalRow]:
    """One row per task and prompt cache, tasks first; see `evaluate`.

    on_row : is told all rows so far, after each context
    """
    rows: list[EvalRow] = []
    total = len(caches) * sum(len(task.prompts) for task in tasks.values())
    with ExitStack() as stack:
        shown = stack.enter_context(stage("evaluating", total=total, unit="problem", shown=progress))
        asked = {name: task.questions for name, task in tasks.items()}

        def tell(task: str, begins: str) -> None:
            shown.tell(f"{task}, {begins}")

        opened = engines.opened(asked, caches, sampling.max_tokens, tell)
        engine, contexts_of = stack.enter_context(opened)
        for name, task in tasks.items():
            points = [Point(name, task, sampling, named(cache)) for cache in caches]
            costs: list[list[ContextCosts]] = [[] for _ in caches]
            for one in contexts_of(name):
                tell(name, f"answers, {label(caches[one.cache])}")
                prompts = [task.prompts[place] for place in one.problems]
                for part, rollouts, seconds in sample_in_parts(engine, prompts, sampling, one.context):
                    problems = [one.problems[place] for place in part]
                    for line in points[one.cache].judge(problems, rollouts, seconds, decode):
                        on_completion(line)
                    shown.advance(len(part))
                costs[one.cache].append(one.costs)
                done = [point.row(_mean(mine)) for point, mine in zip(points, costs, strict=True) if mine]
                on_row([*rows, *done])
            rows += done
    return rows


def named(config: PromptCacheConfig) -> tuple[str, dict[str, Any]]:
    """The name and the settings of a compaction, for a row."""
    settings = asdict(config)
    used = [name for name in settings if name != "policy"] if config.chooses else ["first", "last"]
    return config.policy, {name: settings[name] for name in used}


def label(config: PromptCacheConfig) -> str:
    """A compaction in a few letters, for a progress bar."""
    return f"{config.policy} {config.ratio:g}" if config.chooses else config.policy


def _mean(costs: Sequence[ContextCosts]) -> ContextCosts:
    seconds = {stage: mean(one.seconds[stage] for one in costs) for stage in costs[0].seconds}
    tokens, left, whole = (mean(getattr(one, name) for one in costs) for name in ("tokens", "bytes", "whole_bytes"))
    return ContextCosts(len(costs), tokens, left, whole, seconds)
