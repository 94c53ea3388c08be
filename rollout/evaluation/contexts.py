"""Evaluation after compacted contexts (rollout/context): pass@1 of each task after each compaction of its contexts.

Problems are grouped by context. A context is prefilled, and its reference queries are computed, once for all
compactions that share these queries. All questions about the context are answered after each compaction. Scores and
rows are the same as in any other evaluation (evaluate.py).
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

# Settings that only the compaction uses. Configurations that differ only in these settings share one prefill of a
# context and its reference queries.
COMPACTION = {"policy", "ratio", "select", "aggregate", "pool", "ridge", "fit", "layers", "budgets", "chunk"}


@dataclass(frozen=True)
class Questions:
    """Prompts of the problems of a task, each split into its context and the rest.

    study : token ids of the self-study prompts that follow each context
    """

    prompts: Sequence[SplitPrompt]
    study: Sequence[Sequence[int]]


@dataclass(frozen=True)
class ContextTask(Task):
    """A task whose problems have contexts. Its `prompts` are only the parts of the prompts after the contexts."""

    questions: Questions = field(kw_only=True)


@dataclass(frozen=True)
class Compacted:
    """A context that was compacted with one of several settings.

    cache : index of the settings in the list of settings
    problems : indices of the problems about this context
    costs : time and memory of the compaction
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
    """Compact every context of these problems with each of the settings `caches`. Yields results context by context.

    caches : settings of the compactions; `first` and `last` refer to the context's text, without the chat template
    on_stage : called with the name of each stage when it begins

    Raises UserError, which names the first problem about the context, if a context cannot be compacted with one of
    these settings.
    """
    problems_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for place, prompt in enumerate(questions.prompts):
        problems_of.setdefault((prompt.first, tuple(prompt.context)), []).append(place)
    for number, ((first, tokens), problems) in enumerate(problems_of.items(), start=1):
        context_label = f"context {number} of {len(problems_of)}"
        on_reading_stage = partial(_tell, on_stage, f"{context_label}: {len(tokens)} tokens")
        waiting = {place: replace(cache, first=cache.first + first) for place, cache in enumerate(caches)}
        while waiting:
            shared = _read_alike(waiting)
            try:
                studied = engine.study(tokens, waiting[shared[0]], questions.study, on_reading_stage)
                for place in shared:
                    config = waiting.pop(place)
                    on_stage(f"{context_label}: compaction, {label(config)}")
                    context = studied.compacted(config)
                    sizes = len(context.tokens), context.nbytes, studied.whole.nbytes
                    yield Compacted(place, problems, context, ContextCosts(1, *sizes, context.seconds))
                    del context
                del studied  # frees its memory before the next context is prefilled
            except UserError as error:
                raise UserError(f"problem {problems[0] + 1}: {error.message}", "prompt_cache") from error


def _tell(on_stage: Callable[[str], None], subject: str, begins: str) -> None:
    on_stage(f"{subject}, {begins}")


def _read_alike(configs: Mapping[int, PromptCacheConfig]) -> list[int]:
    """Return the indices of configurations that can share one prefill of a context and its reference queries.

    The first configuration determines the reference queries. Each of the others has the same settings of prefill and
    reference queries, or needs no reference queries.
    """

    def reading(config: PromptCacheConfig) -> dict[str, Any]:
        return {name: value for name, value in asdict(config).items() if name not in COMPACTION}

    lead = next((place for place, config in configs.items() if config.chooses), next(iter(configs)))
    rest = (at for at, item in configs.items() if not item.chooses or reading(item) == reading(configs[lead]))
    return [lead, *(at for at in rest if at != lead)]


@dataclass(frozen=True)
class ContextEngines:
    """The engine that compacts contexts, and the engine that samples answers after them.

    The engine hf does both. If vllm samples, hf first compacts all contexts and writes them to files, so that only one
    of the two engines is loaded at a time.

    answering : function that returns a context manager of the sampling engine; if another engine compacts, it is called
        with `context_entries`, the maximum number of entries of a sequence
    compacting : function that returns a context manager of the compacting engine; None if the sampling engine compacts
    folder : folder for the temporary files
    window : maximum number of tokens that the model can read; None if unknown
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
        """Open the engines. Yields the sampling engine, and a function: name of a task -> iterator over the task's
        compacted contexts.

        questions : questions of each task, by the task's name
        answer : maximum number of tokens that are sampled after a question
        on_stage : called with the name of the task and the name of each stage when the stage begins
        """

        for name, task_questions in questions.items():
            for place, prompt in enumerate(task_questions.prompts):
                tokens = len(prompt.context) + len(prompt.rest)
                if self.window is not None and tokens + answer > self.window:
                    wrong = f"problem {place + 1} has {tokens} tokens, which with {answer} tokens of answer exceed the"
                    remedy = "lower max_prompt_tokens or max_completion_length"
                    raise UserError(f"{wrong} {self.window} tokens that the model can read; {remedy}", f"tasks.{name}")

        def compact_all(engine: Any, name: str) -> Iterator[Compacted]:
            return compacted_contexts(engine, questions[name], caches, partial(on_stage, name))

        if self.compacting is None:
            with self.answering() as engine:
                yield engine, partial(compact_all, engine)
            return
        with TemporaryDirectory(prefix="contexts-", dir=self.folder) as folder:
            stored: dict[str, list[tuple[Path, dict[str, Any]]]] = {name: [] for name in questions}
            largest = 0
            with self.compacting() as engine:
                every = ((name, item) for name in questions for item in compact_all(engine, name))
                for number, (name, item) in enumerate(every):
                    file = Path(folder) / f"{number:05d}.safetensors"
                    save_context(file, item.context)
                    longest = max(len(questions[name].prompts[place].rest) for place in item.problems)
                    largest = max(largest, item.context.entries + longest + answer)
                    stored[name].append((file, {"cache": item.cache, "problems": item.problems, "costs": item.costs}))
                    del item
                del engine
            with self.answering(context_entries=largest) as engine:
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
    """Evaluate every task after every compaction of its contexts. Returns one row per task and compaction, ordered by
    task first.

    The functions that are called are those of `evaluate`; `on_row` is called after each compacted context.
    """
    rows: list[EvalRow] = []
    total = len(caches) * sum(len(task.prompts) for task in tasks.values())
    with ExitStack() as stack:
        shown = stack.enter_context(stage("evaluating", total=total, unit="problem", shown=progress))
        task_questions = {name: task.questions for name, task in tasks.items()}

        def tell(task: str, begins: str) -> None:
            shown.tell(f"{task}, {begins}")

        opened = engines.opened(task_questions, caches, sampling.max_tokens, tell)
        engine, contexts_of = stack.enter_context(opened)
        for name, task in tasks.items():
            points = [Point(name, task, sampling, named(cache)) for cache in caches]
            costs: list[list[ContextCosts]] = [[] for _ in caches]
            for item in contexts_of(name):
                tell(name, f"answers, {label(caches[item.cache])}")
                prompts = [task.prompts[place] for place in item.problems]
                for part, rollouts, seconds in sample_in_parts(engine, prompts, sampling, item.context):
                    problems = [item.problems[place] for place in part]
                    for line in points[item.cache].judge(problems, rollouts, seconds, decode):
                        on_completion(line)
                    shown.advance(len(part))
                costs[item.cache].append(item.costs)
                done = [
                    point.row(_mean(cache_costs))
                    for point, cache_costs in zip(points, costs, strict=True)
                    if cache_costs
                ]
                on_row([*rows, *done])
            rows += done
    return rows


def named(config: PromptCacheConfig) -> tuple[str, dict[str, Any]]:
    """Return the name of a compaction and the settings that it uses, for the row of its results."""
    settings = asdict(config)
    used = [name for name in settings if name != "policy"] if config.chooses else ["first", "last"]
    return config.policy, {name: settings[name] for name in used}


def label(config: PromptCacheConfig) -> str:
    """Return a short label of a compaction for a progress bar: its policy, and its ratio if it has one."""
    return f"{config.policy} {config.ratio:g}" if config.chooses else config.policy


def _mean(costs: Sequence[ContextCosts]) -> ContextCosts:
    seconds = {stage: mean(item.seconds[stage] for item in costs) for stage in costs[0].seconds}
    tokens, kept_bytes, whole = (
        mean(getattr(item, name) for item in costs) for name in ("tokens", "bytes", "whole_bytes")
    )
    return ContextCosts(len(costs), tokens, kept_bytes, whole, seconds)
