"""Reference generations: the answers after the full context, scored after the same context when it is compacted.

Attention Matching, appendix F.2, calls the mean loss of these answers the log-perplexity on original-cache generations.
The lines of the full cache's point hold the answers' token ids, so references are exact also after an interruption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.context import Context
from rollout.engine import Engine, Rollout
from rollout.evaluation.evaluate import Point
from rollout.evaluation.journal import Line
from rollout.requests import NotFiniteLogprobError

IDS, NLL = "completion_ids", "reference_nll"  # keys of a line


def reference_lines(
    engine: Engine, point: Point, problems: Sequence[int], rollouts: Sequence[Rollout], context: Context
) -> list[Line]:
    """Return, for each rollout, further keys and values of its line in the journal.

    `reference_nll` is the mean negative log-likelihood per token, in nats at temperature 1, of the full cache's answer
    to the same problem with the same sample index. If the point is the full cache's, `completion_ids` is this answer.
    Without references the results are empty.

    problems : indices of the problems; `rollouts` are their rollouts after `context`, problem by problem
    """
    if point.reference is None:
        return [{} for _ in rollouts]
    samples = point.sampling.n
    units = [(problem, sample) for problem in problems for sample in range(samples)]
    own = point.reference is point
    answers = [r.completion_ids for r in rollouts] if own else _answers(point.reference, units)
    prompts = [point.task.prompts[problem] for problem, _ in units]
    try:
        scores = engine.logprobs(prompts, answers, context)
    except NotFiniteLogprobError as error:
        raise NotFiniteLogprobError(*units[error.prompt], error.step, error.dtype) from error
    lines: list[Line] = [{NLL: -logprobs.double().mean().item()} for logprobs in scores]
    return [{**line, IDS: ids} for line, ids in zip(lines, answers, strict=True)] if own else lines


def _answers(full: Point, units: Sequence[tuple[int, int]]) -> list[list[int]]:
    lines: Mapping[Any, Line] = full.journal.units(full.key)
    return [lines[unit][IDS] for unit in units]
