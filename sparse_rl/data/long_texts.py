"""Multiple-choice questions about long texts, from the files of QuALITY and LongHealth to rows of ours.

    python -m sparse_rl.data.long_texts quality QuALITY.v1.0.1.htmlstripped.dev --texts 50 > quality.jsonl
    python -m sparse_rl.data.long_texts longhealth benchmark_v5.json --patients 5 > longhealth.jsonl

The files are those of github.com/nyu-mll/quality and github.com/kbressem/LongHealth. A row is {context, prompt, answer,
id}: the text; a question with its options, a line and a letter each; the letter of the right one. Texts, their order
and their groups are as in the evaluation of Attention Matching (arXiv 2602.16284): QuALITY's articles once each, with
all their questions; LongHealth's patients in the order of their names, so many to a text, each note between tags with
its name, and a question about one of several patients says which.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_uppercase
from typing import Any

from sparse_rl.data.rows import Parser, Row, count_of, held, read_objects, write_rows
from sparse_rl.errors import UserError

OPTIONS = [f"answer_{letter}" for letter in "abcde"]


def quality_rows(articles: Iterable[Row]) -> Iterator[Row]:
    """A row for each question that has a right answer, article by article.

    articles : {article, article_id, questions: [{question, options, gold_label, question_unique_id}]}, gold_label from
        1 on; an article may be there several times
    """
    asked_of: dict[tuple[Any, str], list[Row]] = {}
    for number, row in enumerate(articles, start=1):
        where = f"row {number}"
        asked = asked_of.setdefault((row.get("article_id"), held(row, "article", str, where).strip()), [])
        asked += held(row, "questions", list, where)
    for (name, article), asked in asked_of.items():
        for question in asked:
            where = f"article {name}"
            options = held(question, "options", list, where)
            gold = question.get("gold_label")
            if not isinstance(gold, int) or not 1 <= gold <= len(options):
                raise UserError(f"{where} has a question without gold_label; take the train or dev split")
            said = with_options(held(question, "question", str, where), options)
            yield _row(article, said, gold - 1, question.get("question_unique_id"))


def longhealth_rows(patients: Row, together: int) -> Iterator[Row]:
    """A row for each question whose right answer is one of its options; patients that fill no text are left out.

    patients : name -> {texts: {name: note}, name, birthday, diagnosis, questions: [{question, answer_a, ..., correct}]}
    together : patients of one text
    """
    names = sorted(patients)
    for start in range(0, len(names) - together + 1, together):
        group = names[start : start + together]
        notes = [item for name in group for item in held(patients[name], "texts", dict, name).items()]
        context = "\n\n".join(f"<{note}>\n{text}\n</{note}>" for note, text in notes).strip()
        for name in group:
            one = patients[name]
            whom = ", ".join(f"{key} {held(one, key, str, name)}" for key in ("name", "birthday", "diagnosis"))
            about = f"About this patient: ID {name}, {whom}.\n\n" if together > 1 else ""
            for number, question in enumerate(held(one, "questions", list, name), start=1):
                where = f"{name}, question {number}"
                options = [held(question, option, str, where).strip() for option in OPTIONS]
                said = about + with_options(held(question, "question", str, where), options)
                right = held(question, "correct", str, where).strip()
                if right in options:
                    yield _row(context, said, options.index(right), f"{name}_{number}")


def with_options(question: str, options: Sequence[str]) -> str:
    """A question, and each option on a line with its letter."""
    lines = (f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options, strict=False))
    return "\n".join([question, "", *lines])


def _row(context: str, prompt: str, right: int, name: Any) -> Row:
    return {"context": context, "prompt": prompt, "answer": ascii_uppercase[right], "id": name}


def first_texts(rows: Iterable[Row], most: int | None) -> Iterator[Row]:
    """The rows of the first texts; None: of all."""
    seen: set[str] = set()
    for row in rows:
        seen.add(row["context"])
        if most is not None and len(seen) > most:
            return
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows that are asked for to stdout; returns the exit status, 2 for what the user can mend."""
    parser = Parser(prog="python -m sparse_rl.data.long_texts", description="Rows of questions about long texts.")
    jobs = parser.add_subparsers(dest="job", metavar="quality | longhealth", required=True)
    quality, longhealth = jobs.add_parser("quality"), jobs.add_parser("longhealth")
    for job in (quality, longhealth):
        job.add_argument("path", metavar="FILE")
        job.add_argument("--texts", type=count_of, help="the first so many (default: all)")
    longhealth.add_argument("--patients", type=count_of, default=5, help="of one text (default: 5)")

    def rows_of(options: argparse.Namespace) -> Iterable[Row]:
        found = read_objects(options.path, lines=options.job == "quality")
        made = quality_rows(found) if options.job == "quality" else longhealth_rows(found[0], options.patients)
        return first_texts(made, options.texts)

    return write_rows(parser, arguments, rows_of)


if __name__ == "__main__":
    sys.exit(main())
