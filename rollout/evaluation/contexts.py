"""Evaluation after compacted contexts (rollout/context): pass@1 of each task after each compaction of its contexts.

Problems are grouped by context. A context is prefilled, and its reference queries are computed, once for all
compactions that share these queries. After each compaction, all questions about the context are answered. Scores and
rows are the same as in any other evaluation (evaluate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from rollout.context import Context, PromptCacheConfig
from rollout.context.files import load_context, save_context
from rollout.context.prompts import ContextPrompts
from rollout.evaluation.evaluate import ContextCosts, Decode, Point, Task, evaluating
from rollout.evaluation.journal import Journal, point_key
from rollout.evaluation.references import reference_lines
from rollout.evaluation.samples import sample_in_parts
from sparse_rl.data.tokens import SplitPrompt
from sparse_rl.errors import UserError

if TYPE_CHECKING:
    from rollout.hf import HFEngine

# Settings that only the compaction uses. Configurations that differ only in these settings, and divide a context into
# the same parts, share one prefill of the context and its reference queries.
COMPACTION = {"policy", "ratio", "select", "aggregate", "pool", "pooling", "ridge", "fit", "fit_biases", "fit_values"}
COMPACTION |= {"heads", "budgets", "chunk", "chunks", "cartridge"}


@dataclass(frozen=True)
class Questions:
    """Prompts of the problems of a task, each split into its context and the rest.

    about : prompts about each context, for reference queries and summaries
    """

    prompts: Sequence[SplitPrompt]
    about: ContextPrompts


@dataclass(frozen=True)
class ContextTask(Task):
    """A task whose problems have contexts. `prompts` holds only the part of each prompt after its context."""

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
    finished: Sequence[Container[int]] | None = None,
) -> Iterator[Compacted]:
    """Compact the context of every problem, once with each of the settings `caches`. Yields results context by context.

    caches : settings of the compactions; `first` and `last` count tokens of the context's text, without chat template
    finished : for each of `caches`, the indices of the problems that need no answers
    on_stage : called with the name of each stage when the stage begins

    Raises UserError if one of the settings cannot be applied to a context. The message begins with the number of the
    first problem that has this context.
    """
    problems_of = problems_by_context(questions)
    for number, ((first, tokens), problems) in enumerate(problems_of.items(), start=1):
        context_label = f"context {number} of {len(problems_of)}"
        on_reading_stage = partial(_tell, on_stage, f"{context_label}: {len(tokens)} tokens")
        waiting = {
            place: replace(cache, first=cache.first + first)
            for place, cache in enumerate(caches)
            if finished is None or any(problem not in finished[place] for problem in problems)
        }
        while waiting:
            try:
                shared = _read_alike(waiting, len(tokens))
                studied = engine.study(tokens, waiting[shared[0]], questions.about, on_reading_stage)
                for place in sorted(shared, key=lambda at: not waiting[at].keeps_all):
                    config = waiting.pop(place)
                    on_stage(f"{context_label}: compaction, {label(config)}")
                    context = studied.compacted(config)
                    whole_bytes = studied.nbytes * len(tokens) // studied.length  # a summary has other tokens
                    sizes = len(tokens), context.nbytes, whole_bytes
                    yield Compacted(place, problems, context, ContextCosts(1, *sizes, context.seconds))
                    del context
                del studied  # frees its memory before the next context is prefilled
            except UserError as error:
                raise UserError(f"problem {problems[0] + 1}: {error.message}", "prompt_cache") from error


def problems_by_context(questions: Questions) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Return (number of tokens before the context's text, token ids of the context) -> indices of its problems."""
    problems_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for place, prompt in enumerate(questions.prompts):
        problems_of.setdefault((prompt.first, tuple(prompt.context)), []).append(place)
    return problems_of


def check_lengths(questions: Mapping[str, Questions], answer: int, window: int | None) -> None:
    """Raise UserError if a context, a question and an answer are longer than the model can read.

    questions : task's name -> the task's questions
    answer : maximum number of tokens of an answer
    window : maximum number of tokens that the model can read; None if unknown
    """
    for name, task_questions in questions.items():
        for place, prompt in enumerate(task_questions.prompts):
            tokens = len(prompt.context) + len(prompt.rest)
            if window is not None and tokens + answer > window:
                wrong = f"problem {place + 1} has {tokens} tokens, which with {answer} tokens of answer exceed the"
                remedy = "lower max_prompt_tokens or max_completion_length"
                raise UserError(f"{wrong} {window} tokens that the model can read; {remedy}", f"tasks.{name}")


def _tell(on_stage: Callable[[str], None], subject: str, begins: str) -> None:
    on_stage(f"{subject}, {begins}")


def _read_alike(configs: Mapping[int, PromptCacheConfig], tokens: int) -> list[int]:
    """Return the indices of configurations that can share one prefill of a context and its reference queries.

    A full context is among the first that are returned, because its answers are the references of the others.

    The configuration whose index is returned first determines the reference queries. Each of the others has the same
    settings of prefill and reference queries, or needs no reference queries and the same text that is read as a whole.

    tokens : length of the context
    """

    def text(config: PromptCacheConfig) -> Any:
        return config.summary and (config.summary, config.summary_tokens, config.chunks, config.seed)

    def reading(config: PromptCacheConfig) -> Any:
        parts = (config.in_parts, config.chunk) if config.summary else config.parts(tokens)
        return {name: value for name, value in asdict(config).items() if name not in COMPACTION}, parts, text(config)

    def shares(config: PromptCacheConfig) -> bool:
        if config.chooses:
            return reading(config) == reading(configs[lead])
        edges = (config.first, config.last) == (configs[lead].first, configs[lead].last)
        return not configs[lead].by_text and text(config) == text(configs[lead]) and (edges or config.policy != "none")

    whole = next((place for place, config in configs.items() if config.keeps_all), None)
    leads = [place for place, config in configs.items() if config.chooses]
    if whole is not None:
        leads = [place for place in leads if not configs[place].by_text and configs[place].summary is None] + [whole]
    lead = next(iter(leads), next(iter(configs)))
    rest = (at for at, item in configs.items() if shares(item))
    return [lead, *(at for at in rest if at != lead)]


@dataclass(frozen=True)
class ContextEngines:
    """The engine that compacts contexts, and the engine that samples answers after them.

    The engine hf does both. If vllm samples, hf first compacts all contexts and writes them to files, so that only one
    of the two engines is loaded at a time.

    answering : function that returns a context manager of the sampling engine. If another engine compacts, the function
        gets the argument `context_entries`, the maximum number of entries of a sequence
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
        caches: Mapping[str, Sequence[PromptCacheConfig]],
        answer: int,
        on_stage: Callable[[str, str], None],
        finished: Mapping[str, Sequence[Container[int]]] | None = None,
    ) -> Iterator[tuple[Any, Callable[[str], Iterator[Compacted]]]]:
        """Open the engines. Yields the sampling engine, and a function that maps the name of a task to an iterator over
        the task's compacted contexts.

        questions, caches : task's name -> the task's questions; task's name -> the settings of its compactions
        answer : maximum number of tokens that are sampled after a question
        on_stage : called with the name of the task and the name of each stage when the stage begins
        finished : for each task and each of its compactions, the indices of the problems that need no answers
        """
        check_lengths(questions, answer, self.window)

        def compact_all(engine: Any, name: str) -> Iterator[Compacted]:
            done = None if finished is None else finished[name]
            return compacted_contexts(engine, questions[name], caches[name], partial(on_stage, name), done)

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
    points: Sequence[Point],
    engines: ContextEngines,
    decode: Decode,
    journal: Journal,
    *,
    on_point: Callable[[], object],
    progress: bool = True,
) -> None:
    """Finish the points: after each compacted context, sample and score the problems that are not in the journal yet.

    Processes share the work by task: one process compacts and answers all contexts of a task.

    points : one for each pair of a task (ContextTask) and a setting of compactions, ordered by task
    on_point : called after each finished task
    """
    names = list(dict.fromkeys(point.name for point in points))
    with evaluating(points, progress) as shown, ExitStack() as stack:

        def tell(task: str, begins: str) -> None:
            shown.tell(f"{task}, {begins}")

        taken = [name for name in names if stack.enter_context(journal.take(point_key("contexts", name)))]
        todo = {name: [point for point in points if point.name == name and not point.complete] for name in taken}
        if not any(todo.values()):
            return
        todo = {name: waiting for name, waiting in todo.items() if waiting}
        questions = {name: cast(ContextTask, waiting[0].task).questions for name, waiting in todo.items()}
        caches = {name: [point.cache for point in waiting] for name, waiting in todo.items()}
        finished = {name: [point.finished() for point in waiting] for name, waiting in todo.items()}
        answer = points[0].sampling.max_tokens
        engine, contexts_of = stack.enter_context(engines.opened(questions, caches, answer, tell, finished))
        for name, waiting in todo.items():
            for item in contexts_of(name):
                point, done = waiting[item.cache], finished[name][item.cache]
                tell(name, f"answers, {label(point.cache)}")
                prompts = [point.task.prompts[place] for place in item.problems]
                skipped = [place for place, problem in enumerate(item.problems) if problem in done]
                about = {"context": item.problems[0], "costs": asdict(item.costs)}
                parts = sample_in_parts(engine, prompts, point.sampling, item.context, skipped)
                for part, rollouts, seconds in parts:
                    problems = [item.problems[place] for place in part]
                    scored = reference_lines(engine, point, problems, rollouts, item.context)
                    point.judge(problems, rollouts, seconds, decode, named(point.cache), scored, **about)
                    shown.advance(len(set(problems) - done))
            on_point()


def named(config: PromptCacheConfig) -> tuple[str, dict[str, Any]]:
    """Return the name of a compaction and the settings that it uses, for the row of its results."""
    settings = asdict(config)
    of_baselines = {"first", "last", *(("chunks", "summary", "summary_tokens") if config.summary else ())}
    if config.policy == "cartridge":
        of_baselines |= {"ratio", "cartridge", "study_samples", "study_tokens", "seed"}
    of_choosers = settings.keys() - {"policy", "cartridge"}
    used = [name for name in settings if name in (of_choosers if config.chooses else of_baselines)]
    return config.policy, {name: settings[name] for name in used}


def label(config: PromptCacheConfig) -> str:
    """Return a short label of a compaction for a progress bar: its policy, and its ratio if it has one."""
    return f"{config.policy} {config.ratio:g}" if config.sized else config.policy
