"""WikiSalad: questions about interleaved Wikipedia paragraphs, the benchmark of LuKA.

    python -m sparse_rl.data.wikisalad make SQUAD --pattern AABBAABB --count 100 > salad.jsonl
    python -m sparse_rl.data.wikisalad questions salad.jsonl > questions.jsonl

`make` writes salads: rows {example_id, prompt, questions, metadata} in the format of the authors' files. Each letter of
a pattern stands for an article, and each position for a segment: a paragraph of the letter's article and a question.
The questions of an article are consecutive, starting at a random one. `questions` writes a row for each question of
such a file. The row's prompt is the salad and the question, in the authors' wording.

Differences from the authors' files: paragraphs are complete (theirs end after three sentences, which cuts off many
answers), an article's questions are not always its first ones, and letters are assigned to topics in the order of the
pattern (theirs come from an unordered set).
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
    """A question about a paragraph of an article; `answers` is empty if the paragraph does not answer the question."""

    title: str
    context: str
    question: str
    answers: tuple[str, ...]


def make_salads(questions: Iterable[Question], pattern: str, count: int, seed: int = 0) -> Iterator[Row]:
    """Yield `count` salads of a pattern such as ABAB. Raises UserError if there are too few articles or questions."""
    if not re.fullmatch("[A-Z]+", pattern):
        raise UserError(f"expected capital letters, one for each article, such as ABAB, got {show(pattern)}", "pattern")
    of_article: dict[str, list[Question]] = {}
    for question in questions:
        of_article.setdefault(question.title, []).append(question)
    topics = list(dict.fromkeys(pattern))
    most = max(map(pattern.count, topics))
    titles = [title for title, qas in of_article.items() if len(qas) >= most]
    if len(titles) < len(topics):
        requirement = f"{pattern} needs {len(topics)} articles with at least {most} questions each"
        raise UserError(f"{requirement}, but only {len(titles)} of {len(of_article)} articles have them", "pattern")
    rng = random.Random(seed)
    for number in range(count):
        articles = rng.sample(titles, len(topics))
        questions_of_topic = {}
        for topic, title in zip(topics, articles, strict=True):
            start = rng.randrange(len(of_article[title]) - most + 1)
            questions_of_topic[topic] = iter(of_article[title][start : start + most])
        qas = [(topic, next(questions_of_topic[topic])) for topic in pattern]
        yield {
            "example_id": number,
            "prompt": salad_prompt(question for _, question in qas),
            "questions": [
                {
                    "question": question.question,
                    "answers": {"text": list(question.answers)},
                    "segment_id": segment,
                    "topic": topic,
                    "article": question.title,
                }
                for segment, (topic, question) in enumerate(qas)
            ],
            "metadata": {"pattern": pattern, "articles": articles},
        }


def salad_prompt(segments: Iterable[Question]) -> str:
    return "\n".join(
        f"# Segment {number}: {segment.title}\n\n{segment.context}\n\n\nQuestion {number}: {segment.question}\n"
        for number, segment in enumerate(segments, start=1)
    )


def read_squad(path: str) -> list[Question]:
    """Read the questions of a file in SQuAD v2 format: one row per question, or the one object of SQuAD's own files."""
    rows = read_objects(path)
    if isinstance(rows[0].get("data"), list):
        try:
            rows = [
                {"title": article["title"], "context": paragraph["context"], **qas}
                for row in rows
                for article in row["data"]
                for paragraph in article["paragraphs"]
                for qas in paragraph["qas"]
            ]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path} does not have the format of SQuAD's own files, {{data: [...]}}: {error!r}"
            ) from error
    entries = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        title, context, question = (held(row, name, str, where) for name in ("title", "context", "question"))
        entries.append(Question(title, context, question, _answers(row, where)))
    return entries


def flatten(salads: Iterable[Row], where: str = "salads") -> Iterator[Row]:
    """Yield a row for each question of each salad, ours or the authors'. Raises UserError if a row is not a salad."""
    for number, salad in enumerate(salads, start=1):
        place = f"{where}, row {number}"
        prompt, qas = held(salad, "prompt", str, place), salad.get("questions")
        if not isinstance(qas, list) or not all(isinstance(item, dict) for item in qas):
            raise UserError(f"{place} has no list of 'questions'; is it a file of salads?")
        metadata = salad.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise UserError(f"{place}: metadata is not a mapping")
        for item in qas:
            question = held(item, "question", str, place)
            yield {
                "prompt": ASKED.format(prompt=prompt, question=question),
                "question": question,
                "answers": list(_answers(item, place)),
                "pattern": metadata.get("pattern"),
                "segment": item.get("segment_id"),
                "topic": item.get("topic"),
            }


def _answers(row: Row, where: str) -> tuple[str, ...]:
    """Return the distinct correct answers of a question, given as {text: [...]} or as SQuAD's [{text: ...}, ...]."""
    entries = row.get("answers")
    entries = (
        [item.get("text") if isinstance(item, dict) else item for item in entries]
        if isinstance(entries, list)
        else entries
    )
    entries = entries.get("text") if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not all(isinstance(text, str) for text in entries):
        raise UserError(f"{where}: expected answers {{text: [...]}}, got {show(row.get('answers'))}")
    return tuple(dict.fromkeys(entries))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m sparse_rl.data.wikisalad", description="Make salads, or rows of their questions.")
    jobs = parser.add_subparsers(dest="job", metavar="make | questions", required=True)
    make = jobs.add_parser("make", help="make salads from a dataset in SQuAD v2 format")
    make.add_argument("path", metavar="SQUAD", help="rows {title, context, question, answers: {text: [...]}}")
    make.add_argument("--pattern", required=True, help="pattern with one letter per article, such as ABAB")
    make.add_argument("--count", type=count_of, default=100, help="number of salads (default: 100)")
    make.add_argument("--seed", type=int, default=0)
    questions = jobs.add_parser("questions", help="write a row for each question in a file of salads")
    questions.add_argument("path", metavar="SALADS")

    def rows_of(options: argparse.Namespace) -> Iterable[Row]:
        if options.job == "questions":
            return flatten(read_objects(options.path), options.path)
        return make_salads(read_squad(options.path), options.pattern, options.count, options.seed)

    return write_rows(parser, arguments, rows_of)


if __name__ == "__main__":
    sys.exit(main())
