"""Converts published datasets to the rows that a recipe's `data:` block reads: JSON Lines on the standard output.

    python -m sparse_rl.data.convert quality QuALITY.v1.0.1.htmlstripped.dev --texts 50 > quality.jsonl
    python -m sparse_rl.data.convert longhealth benchmark_v5.json --patients 5 > longhealth.jsonl
    python -m sparse_rl.data.convert wikisalad SQUAD --pattern AABBAABB --count 100 > salad.jsonl
    python -m sparse_rl.data.convert wikisalad-questions salad.jsonl > questions.jsonl
    python -m sparse_rl.data.convert nemotron high.part_0*.jsonl --model Qwen/Qwen3-8B --tokens 16384 > FILE
    zstd -dc SHARD.jsonl.zst ... | python -m sparse_rl.data.convert longmino - --model MODEL --tokens 4096 > FILE

*Questions about long texts* (github.com/nyu-mll/quality, github.com/kbressem/LongHealth). A row is {context, prompt,
answer, id}: the text, a question with lettered options, the letter of the correct option, and a name. Each QuALITY
article appears once, with all its questions. LongHealth's patients are sorted by name and grouped into texts of a fixed
number of patients; their order and the marks around their notes follow the code of Attention Matching's authors.

*WikiSalad*, the benchmark of LuKA: questions about interleaved Wikipedia paragraphs. `wikisalad` writes salads in the
format of the authors' files. Each letter of a pattern stands for an article, and each position for a segment: a
paragraph of the article and a question. The questions of an article are consecutive, starting at a random one.
`wikisalad-questions` writes a row for each question of such a file, ours or the authors', in the authors' wording.
Differences from the authors' files: paragraphs are complete (theirs end after three sentences, which cuts off many
answers), an article's questions are not always its first ones, and letters are assigned to topics in the order of the
pattern (theirs come from an unordered set).

*Texts for KVpop's trainings* (nvidia/Nemotron-Math-v2, allenai/dolma3_longmino_mix-*). A row is {prompt, completion}.
MODEL gives the tokenizer that counts tokens. `nemotron` writes the reasoning as <think>, and leaves out conversations
with tools, those without reasoning, and those of more than `--tokens` tokens. `longmino` cuts each text into pieces of
at most `--tokens` tokens; the prompt is the first word of a piece.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_uppercase
from typing import Any, TypeVar

from sparse_rl.config import show
from sparse_rl.data.problems import with_options
from sparse_rl.data.source import Row, json_rows, rows_of_file
from sparse_rl.data.tokens import completion_ids, prompt_ids
from sparse_rl.errors import UserError, one_line

T = TypeVar("T")
KINDS: dict[type, str] = {str: "text", list: "list", dict: "mapping"}
OPTIONS = [f"answer_{letter}" for letter in "abcde"]
MARK = "."  # after the letter of an option
ASKED = (
    "{prompt}\n\nAnswer the following question in one short phrase. Do not include any other text.\n\n"
    "Question: {question}\n\nAnswer:"
)


def read_rows(path: str) -> Iterator[Row]:
    """Yield the rows of a file (see `rows_of_file`); - stands for the standard input."""
    return json_rows(sys.stdin.buffer) if path == "-" else rows_of_file(path)


def held(row: Any, name: str, kind: type[T], where: str) -> T:
    """Return `row[name]`. Raises UserError if it is missing or not of type `kind` (str, list or dict)."""
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        contents = f"it has {', '.join(row) or 'nothing'}" if isinstance(row, dict) else f"it is {show(row)}"
        raise UserError(f"{where} has no {KINDS[kind]} {name!r}; {contents}")
    return value


# ---- questions about long texts --------------------------------------------------------------------------------------


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
            details = [f"{key} {held(patient, key, str, name)}" for key in ("name", "birthday", "diagnosis")]
            about = f"About this patient: ID {name}, {', '.join(details)}.\n\n" if together > 1 else ""
            for number, question in enumerate(held(patient, "questions", list, name), start=1):
                where = f"{name}, question {number}"
                options = [held(question, option, str, where).strip() for option in OPTIONS]
                full_question = about + with_options(held(question, "question", str, where), options, MARK)
                correct = held(question, "correct", str, where).strip()
                if correct in options:
                    yield _row(context, full_question, options.index(correct), f"{name}_{number}")


def _row(context: str, prompt: str, correct: int, name: Any) -> Row:
    return {"context": context, "prompt": prompt, "answer": ascii_uppercase[correct], "id": name}


def first_texts(rows: Iterable[Row], most: int | None) -> list[Row]:
    rows = list(rows)
    contexts = list(dict.fromkeys(row["context"] for row in rows))[:most]
    return [row for row in rows if row["context"] in set(contexts)]


# ---- WikiSalad -------------------------------------------------------------------------------------------------------


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
        wrong = f"needs {len(topics)} articles with at least {most} questions each, but only {len(titles)}"
        raise UserError(f"{pattern} {wrong} of {len(of_article)} articles have them", "pattern")
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
    rows = list(read_rows(path))
    if rows and isinstance(rows[0].get("data"), list):
        try:
            rows = [
                {"title": article["title"], "context": paragraph["context"], **qas}
                for row in rows
                for article in row["data"]
                for paragraph in article["paragraphs"]
                for qas in paragraph["qas"]
            ]
        except (KeyError, TypeError) as error:
            wrong = f"does not have the format of SQuAD's own files, {{data: [...]}}: {error!r}"
            raise UserError(f"{path} {wrong}") from error
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
        prompt, pattern = held(salad, "prompt", str, place), (salad.get("metadata") or {}).get("pattern")
        for item in held(salad, "questions", list, place):
            question = held(item, "question", str, place)
            yield {
                "prompt": ASKED.format(prompt=prompt, question=question),
                "question": question,
                "answers": list(_answers(item, place)),
                "pattern": pattern,
                "segment": item.get("segment_id"),
                "topic": item.get("topic"),
            }


def _answers(row: Row, where: str) -> tuple[str, ...]:
    """Return the distinct correct answers of a question, given as {text: [...]} or as SQuAD's [{text: ...}, ...]."""
    entries = row.get("answers")
    if isinstance(entries, dict):
        entries = entries.get("text")
    elif isinstance(entries, list):
        entries = [item.get("text") if isinstance(item, dict) else item for item in entries]
    if not isinstance(entries, list) or not all(isinstance(text, str) for text in entries):
        raise UserError(f"{where}: expected answers {{text: [...]}}, got {show(row.get('answers'))}")
    return tuple(dict.fromkeys(entries))


# ---- texts for KVpop's trainings -------------------------------------------------------------------------------------


def nemotron_rows(row: Row, where: str, tokenizer: Any, most: int) -> Iterator[Row | str]:
    """Yield the row of a conversation, or the reason why it is left out."""
    messages = [m for m in held(row, "messages", list, where) if isinstance(m, dict) and m.get("role") != "system"]
    if row.get("tools") or [message.get("role") for message in messages] != ["user", "assistant"]:
        yield "with tools or several turns"
        return
    prompt, answer = (held(message, "content", str, where) for message in messages)
    reasoning = messages[1].get("reasoning_content")
    completion = f"<think>\n{reasoning}\n</think>\n\n{answer}"
    chat = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
    if not reasoning:
        yield "without reasoning_content"
    elif len(prompt_ids(chat, tokenizer)) + len(completion_ids(completion, tokenizer)) > most:
        yield f"longer than {most} tokens"
    else:
        yield {"prompt": prompt, "completion": completion}


def longmino_rows(row: Row, where: str, tokenizer: Any, most: int) -> Iterator[Row | str]:
    """Yield the rows of a text's pieces. Two tokens of each are for the start and the end of a sequence."""
    text = held(row, "text", str, where)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    cuts = [*(start for start, _ in offsets[:: most - 2]), len(text)]
    for start, end in pairwise(cuts):
        first, *rest = text[start:end].split(maxsplit=1) or [""]
        if rest:
            yield {"prompt": first, "completion": text[start:end].lstrip()[len(first) :]}
        else:
            yield "of a single word"


def read_conversations(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of files that may be larger than memory, and say on stderr how many rows there are."""
    from sparse_rl.models.load import load_tokenizer

    if options.tokens < 4:
        raise UserError("--tokens must be at least 4")
    rows_of = {"nemotron": nemotron_rows, "longmino": longmino_rows}[options.job]
    tokenizer, counts = load_tokenizer(options.model), Counter[str]()
    for path in options.paths:
        for number, row in enumerate(read_rows(path), start=1):
            for result in rows_of(row, f"{path}, row {number}", tokenizer, options.tokens):
                if isinstance(result, str):
                    counts[f"{result} left out"] += 1
                else:
                    yield result
                    counts["rows"] += 1
    summary = ", ".join(f"{count} {what}" for what, count in counts.items())
    if not counts["rows"]:
        raise UserError(f"no rows; {summary}")
    print(summary, file=sys.stderr)


# ---- the command -----------------------------------------------------------------------------------------------------


def count_of(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 1,000,000, got {show(text)}")
    return int(text)


def quality(options: argparse.Namespace) -> Iterable[Row]:
    return first_texts(quality_rows(read_rows(options.path)), options.texts)


def longhealth(options: argparse.Namespace) -> Iterable[Row]:
    return first_texts(longhealth_rows(next(read_rows(options.path), {}), options.patients), options.texts)


def salads(options: argparse.Namespace) -> Iterable[Row]:
    return list(make_salads(read_squad(options.path), options.pattern, options.count, options.seed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows that the arguments request. Return the exit status, 2 for an error of the user."""
    top = argparse.ArgumentParser(prog="python -m sparse_rl.data.convert")
    jobs = top.add_subparsers(dest="job", required=True)
    for name, rows_of in (("quality", quality), ("longhealth", longhealth)):
        job = jobs.add_parser(name, help="questions about long texts")
        job.set_defaults(rows_of=rows_of)
        job.add_argument("path", metavar="FILE")
        job.add_argument("--texts", type=count_of, help="number of texts, from the first (default: all)")
    job.add_argument("--patients", type=count_of, default=5, help="number of patients per text (default: 5)")
    job = jobs.add_parser("wikisalad", help="salads from a dataset in SQuAD v2 format")
    job.set_defaults(rows_of=salads)
    job.add_argument("path", metavar="SQUAD", help="rows {title, context, question, answers: {text: [...]}}")
    job.add_argument("--pattern", required=True, help="pattern with one letter per article, such as ABAB")
    job.add_argument("--count", type=count_of, default=100, help="number of salads (default: 100)")
    job.add_argument("--seed", type=int, default=0)
    job = jobs.add_parser("wikisalad-questions", help="questions of salads")
    job.set_defaults(rows_of=lambda options: list(flatten(read_rows(options.path), options.path)))
    job.add_argument("path", metavar="SALADS")
    for name in ("nemotron", "longmino"):
        job = jobs.add_parser(name, help="texts for KVpop's trainings")
        job.set_defaults(rows_of=read_conversations)
        job.add_argument("paths", metavar="FILE", nargs="+", help="JSON Lines, or - for the standard input")
        job.add_argument("--model", required=True, help="model whose tokenizer counts tokens")
        job.add_argument("--tokens", type=count_of, required=True, help="largest number of tokens of a row")
    options, written = top.parse_args(arguments), False
    try:
        for row in options.rows_of(options):
            print(json.dumps(row))
            written = True
        if not written:
            raise UserError("no rows")
    except (OSError, UserError) as error:
        print(f"convert: error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
