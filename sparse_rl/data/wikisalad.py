"""WikiSalad: questions about interleaved Wikipedia paragraphs, as LuKA is evaluated on them.

    python -m sparse_rl.data.wikisalad make SQUAD --pattern AABBAABB --count 100 > salad.jsonl
    python -m sparse_rl.data.wikisalad questions salad.jsonl > questions.jsonl

`make` writes salads: rows {example_id, prompt, questions, metadata}, in the form of the authors' own files. Each letter
of a pattern is an article, and each place a segment: a paragraph of that article with one of its questions. The
questions of an article are consecutive ones, from a random one on. `questions` writes a row for each question of such a
file: {prompt, question, answers, pattern, segment, topic}, whose prompt ends in the question, as the authors ask it.

Other than theirs: paragraphs are whole (theirs end after three sentences, which leaves many an answer out), an
article's questions are not always its first ones, and topics have letters in the order of the pattern (theirs come from
an unordered set).
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sparse_rl.config import show
from sparse_rl.data.rows import Parser, Row, count_of, held, read_objects, write_rows
from sparse_rl.errors import UserError

ASKED = (
    "{prompt}\n\nAnswer the following question in one short phrase. Do not include any other text.\n\n"
    "Question: {question}\n\nAnswer:"
)


@dataclass(frozen=True)
class Question:
    """A question about a paragraph of an article; `answers` is empty where the paragraph does not answer it."""

    title: str
    context: str
    question: str
    answers: tuple[str, ...]


def make_salads(questions: Iterable[Question], pattern: str, count: int, seed: int = 0) -> Iterator[Row]:
    """So many salads of a pattern such as ABAB. Raises UserError where the articles or their questions do not do."""
    if not re.fullmatch("[A-Z]+", pattern):
        raise UserError(f"expected capital letters, one for each article, such as ABAB, got {show(pattern)}", "pattern")
    of_article: dict[str, list[Question]] = {}
    for question in questions:
        of_article.setdefault(question.title, []).append(question)
    topics = list(dict.fromkeys(pattern))
    most = max(map(pattern.count, topics))
    titles = [title for title, asked in of_article.items() if len(asked) >= most]
    if len(titles) < len(topics):
        need = f"{pattern} needs {len(topics)} articles with at least {most} questions each"
        raise UserError(f"{need}, and of {len(of_article)} articles {len(titles)} have them", "pattern")
    rng = random.Random(seed)
    for number in range(count):
        articles = rng.sample(titles, len(topics))
        taken = {}
        for topic, title in zip(topics, articles, strict=True):
            start = rng.randrange(len(of_article[title]) - most + 1)
            taken[topic] = iter(of_article[title][start : start + most])
        asked = [(topic, next(taken[topic])) for topic in pattern]
        yield {
            "example_id": number,
            "prompt": salad_prompt(question for _, question in asked),
            "questions": [
                {
                    "question": question.question,
                    "answers": {"text": list(question.answers)},
                    "segment_id": segment,
                    "topic": topic,
                    "article": question.title,
                }
                for segment, (topic, question) in enumerate(asked)
            ],
            "metadata": {"pattern": pattern, "articles": articles},
        }


def salad_prompt(segments: Iterable[Question]) -> str:
    """The segments of a salad, each with its question."""
    return "\n".join(
        f"# Segment {number}: {segment.title}\n\n{segment.context}\n\n\nQuestion {number}: {segment.question}\n"
        for number, segment in enumerate(segments, start=1)
    )


def read_squad(path: str) -> list[Question]:
    """The questions of a data set in the form of SQuAD v2: one row each, or the one object of SQuAD's own files.

    Raises UserError where it cannot be read, or holds anything else.
    """
    rows = read_objects(path)
    if isinstance(rows[0].get("data"), list):
        try:
            rows = [
                {"title": article["title"], "context": paragraph["context"], **asked}
                for row in rows
                for article in row["data"]
                for paragraph in article["paragraphs"]
                for asked in paragraph["qas"]
            ]
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is not in the form of SQuAD's own files, {{data: [...]}}: {error!r}") from error
    found = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        title, context, question = (held(row, name, str, where) for name in ("title", "context", "question"))
        found.append(Question(title, context, question, _answers(row, where)))
    return found


def flatten(salads: Iterable[Row], where: str = "salads") -> Iterator[Row]:
    """A row for each question of each salad, ours or the authors'. Raises UserError for a row that is no salad."""
    for number, salad in enumerate(salads, start=1):
        place = f"{where}, row {number}"
        prompt, asked = held(salad, "prompt", str, place), salad.get("questions")
        if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
            raise UserError(f"{place} has no list of 'questions'; is it a file of salads?")
        metadata = salad.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise UserError(f"{place} has metadata that is no mapping")
        for one in asked:
            question = held(one, "question", str, place)
            yield {
                "prompt": ASKED.format(prompt=prompt, question=question),
                "question": question,
                "answers": list(_answers(one, place)),
                "pattern": metadata.get("pattern"),
                "segment": one.get("segment_id"),
                "topic": one.get("topic"),
            }


def _answers(row: Row, where: str) -> tuple[str, ...]:
    """The true answers of a question, each once: {text: [...]}, or SQuAD's own [{text: ...}, ...]."""
    found = row.get("answers")
    found = [one.get("text") if isinstance(one, dict) else one for one in found] if isinstance(found, list) else found
    found = found.get("text") if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise UserError(f"{where}: expected answers {{text: [...]}}, got {show(row.get('answers'))}")
    return tuple(dict.fromkeys(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows that are asked for to stdout; returns the exit status, 2 for what the user can mend."""
    parser = Parser(prog="python -m sparse_rl.data.wikisalad", description="Make salads, and rows of their questions.")
    jobs = parser.add_subparsers(dest="job", metavar="make | questions", required=True)
    make = jobs.add_parser("make", help="salads of a data set in the form of SQuAD v2")
    make.add_argument("path", metavar="SQUAD", help="rows {title, context, question, answers: {text: [...]}}")
    make.add_argument("--pattern", required=True, help="such as ABAB: a letter for each article")
    make.add_argument("--count", type=count_of, default=100, help="of salads (default: 100)")
    make.add_argument("--seed", type=int, default=0)
    questions = jobs.add_parser("questions", help="a row for each question of a file of salads")
    questions.add_argument("path", metavar="SALADS")

    def rows_of(options: argparse.Namespace) -> Iterable[Row]:
        if options.job == "questions":
            return flatten(read_objects(options.path), options.path)
        return make_salads(read_squad(options.path), options.pattern, options.count, options.seed)

    return write_rows(parser, arguments, rows_of)


if __name__ == "__main__":
    sys.exit(main())
