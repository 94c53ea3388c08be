"""Multiple-choice questions about long texts: converts the files of QuALITY and LongHealth to rows.

    python -m sparse_rl.data.long_texts quality QuALITY.v1.0.1.htmlstripped.dev --texts 50 > quality.jsonl
    python -m sparse_rl.data.long_texts longhealth benchmark_v5.json --patients 5 > longhealth.jsonl

The files come from github.com/nyu-mll/quality and github.com/kbressem/LongHealth. A row is {context, prompt, answer,
id}: the text, a question with lettered options, the letter of the correct option, and a name. Each QuALITY article
appears once, with all its questions. LongHealth's patients are sorted by name and grouped into texts of a fixed number
of patients. Attention Matching (arXiv 2602.16284) evaluates the first 50 articles, and groups of five patients; the
order of the patients and the marks around their notes follow its authors' code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_uppercase
from typing import Any

from sparse_rl.data.choices import with_options
from sparse_rl.data.rows import Parser, Row, count_of, held, read_objects, write_rows
from sparse_rl.errors import UserError

OPTIONS = [f"answer_{letter}" for letter in "abcde"]
MARK = "."  # after the letter of an option


def quality_rows(articles: Iterable[Row]) -> Iterator[Row]:
    """Yield a row for each question, article by article. An article may occur several times in `articles`.

    Raises UserError for a question without a valid gold_label, which is counted from 1.
    """
    questions_of: dict[tuple[Any, str], list[Row]] = {}
    for number, row in enumerate(articles, start=1):
        where = f"row {number}"
        questions = questions_of.setdefault((row.get("article_id"), held(row, "article", str, where).strip()), [])
        questions += held(row, "questions", list, where)
    for (name, article), questions in questions_of.items():
        for question in questions:
            where = f"article {name}"
            options = held(question, "options", list, where)
            gold = question.get("gold_label")
            if not isinstance(gold, int) or not 1 <= gold <= len(options):
                raise UserError(f"{where} has a question without gold_label; take the train or dev split")
            full_question = with_options(held(question, "question", str, where), options, MARK)
            yield _row(article, full_question, gold - 1, question.get("question_unique_id"))


def longhealth_rows(patients: Row, together: int) -> Iterator[Row]:
    """Yield a row for each question whose correct answer is one of its options. An incomplete last group is left out.

    patients : name -> {texts: {name: note}, name, birthday, diagnosis, questions: [{question, answer_a, ..., correct}]}
    together : number of patients in a group, whose notes form one text
    """
    names = sorted(patients)
    for start in range(0, len(names) - together + 1, together):
        group = names[start : start + together]
        notes = [item for name in group for item in held(patients[name], "texts", dict, name).items()]
        context = "\n\n".join(f"<{note}>\n{text}\n</{note}>" for note, text in notes).strip()
        for name in group:
            patient = patients[name]
            personal_data = ", ".join(
                f"{key} {held(patient, key, str, name)}" for key in ("name", "birthday", "diagnosis")
            )
            about = f"About this patient: ID {name}, {personal_data}.\n\n" if together > 1 else ""
            for number, question in enumerate(held(patient, "questions", list, name), start=1):
                where = f"{name}, question {number}"
                options = [held(question, option, str, where).strip() for option in OPTIONS]
                full_question = about + with_options(held(question, "question", str, where), options, MARK)
                correct = held(question, "correct", str, where).strip()
                if correct in options:
                    yield _row(context, full_question, options.index(correct), f"{name}_{number}")


def _row(context: str, prompt: str, correct: int, name: Any) -> Row:
    return {"context": context, "prompt": prompt, "answer": ascii_uppercase[correct], "id": name}


def first_texts(rows: Iterable[Row], most: int | None) -> Iterator[Row]:
    seen: set[str] = set()
    for row in rows:
        seen.add(row["context"])
        if most is not None and len(seen) > most:
            return
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m sparse_rl.data.long_texts", description="Write rows of questions about long texts.")
    jobs = parser.add_subparsers(dest="job", metavar="quality | longhealth", required=True)
    quality, longhealth = jobs.add_parser("quality"), jobs.add_parser("longhealth")
    for job in (quality, longhealth):
        job.add_argument("path", metavar="FILE")
        job.add_argument("--texts", type=count_of, help="number of texts, from the first (default: all)")
    longhealth.add_argument("--patients", type=count_of, default=5, help="number of patients per text (default: 5)")

    def rows_of(options: argparse.Namespace) -> Iterable[Row]:
        objects = read_objects(options.path, lines=options.job == "quality")
        all_rows = quality_rows(objects) if options.job == "quality" else longhealth_rows(objects[0], options.patients)
        return first_texts(all_rows, options.texts)

    return write_rows(parser, arguments, rows_of)


if __name__ == "__main__":
    sys.exit(main())
