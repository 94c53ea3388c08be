"""Retrieval: facts in a document of one or two thousand tokens, and questions about them.

A fact gives a name a digit; it is one word, which is one token. The document states each fact several times, as
documents do, all in random order, and between them stand words that say nothing. Each question names one fact.

    known: ba=7 the of du=2 and for ba=7 it on du=2 from by asked: du?   ->   2 ba? 7

A worked answer goes on to ask, and to answer, the other facts, so that a model learns from all of them, and learns
what may be asked. What a small cache must hold is known: the facts, one entry each where no entry stands for two.

The file holds the task, its tokenizer, the configuration of a model for it, and its rows of data, of which synthetic.py
makes the splits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.data.synthetic import EOS_ID, PAD_ID, Problem, drawn, small_config, word_tokenizer
from sparse_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

NAMES = tuple(consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou")
DIGITS, UNSAID = tuple("0123456789"), 10  # a problem has of each name its digit, or UNSAID
SAYS_NOTHING = "the of and that it was for on are with they his from at by this have or one had but not what"
FILLER = tuple(SAYS_NOTHING.split())
KNOWN, ASKED = "known:", "asked:"  # before the document, and before the questions
SPECIAL = ("<pad>", "<eos>", "<unk>")
QUESTIONS = tuple(f"{name}?" for name in NAMES)
FACTS = tuple(f"{name}={digit}" for name in NAMES for digit in DIGITS)
WORDS = (*SPECIAL, KNOWN, ASKED, *DIGITS, *FILLER, *QUESTIONS, *FACTS)
VOCABULARY = 1152  # padded
MOST_TOKENS = 4096  # of a row


@dataclass(frozen=True)
class Retrieval:
    """`facts` facts, each stated `restated` times, with `filler` words behind each statement."""

    facts: int = 50
    restated: int = 7
    filler: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.facts <= len(NAMES) or self.restated < 1 or self.filler < 0:
            raise UserError(f"retrieval: facts 1 to {len(NAMES)}, restated >= 1 and filler >= 0, got {self}")

    def problem(self, rng: random.Random) -> Problem:
        """For each of NAMES the digit that it is given, UNSAID for those that no fact is about."""
        said = set(rng.sample(range(len(NAMES)), self.facts))
        return tuple(rng.randrange(len(DIGITS)) if name in said else UNSAID for name in range(len(NAMES)))

    def document(self, problem: Problem, rng: random.Random) -> str:
        """Every fact, `restated` times, in random order; of `document_tokens` tokens."""
        stated = [f"{NAMES[name]}={digit}" for name, digit in facts_of(problem).items()] * self.restated
        rng.shuffle(stated)
        return " ".join([KNOWN, *(word for fact in stated for word in (fact, *rng.choices(FILLER, k=self.filler)))])

    def questions(self, problem: Problem, rng: random.Random) -> list[tuple[str, str]]:
        """A question about each fact, and its answer, in random order."""
        asked = [(f"{NAMES[name]}?", DIGITS[digit]) for name, digit in facts_of(problem).items()]
        rng.shuffle(asked)
        return asked

    @property
    def document_tokens(self) -> int:
        """Tokens of a document, which are its words."""
        return 1 + self.facts * self.restated * (1 + self.filler)


def facts_of(problem: Problem) -> dict[int, int]:
    """The place of each name that is given a digit -> the digit."""
    return {name: digit for name, digit in enumerate(problem) if digit != UNSAID}


def problems(split: str, seed: int, task: Retrieval) -> Iterator[Problem]:
    """Problems of a split, without end; two splits never share one. Two seeds of one split may."""
    return (problem for problem in drawn("retrieval", split, seed, task.problem) if problem is not None)


def rows(
    split: str, size: int, seed: int, with_response: bool = False, task: Retrieval | None = None
) -> list[dict[str, Any]]:
    """Rows {prompt, answer} and, with_response, a worked `completion` without the end-of-text token.

    The prompt is a document and one question, the completion its answer and the other questions with theirs.
    """
    task = task or Retrieval()
    rng = random.Random(f"retrieval/documents/{split}/{seed}")
    out: list[dict[str, Any]] = []
    for problem, _ in zip(problems(split, seed, task), range(size)):  # noqa: B905  # the problems have no end
        document, asked = task.document(problem, rng), task.questions(problem, rng)
        row = {"prompt": f"{document} {ASKED} {asked[0][0]}", "answer": asked[0][1]}
        if with_response:
            others = "".join(f" {question} {answer}" for question, answer in asked[1:])
            row["completion"] = f" {asked[0][1]}{others}"
        out.append(row)
    return out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word. No chat template."""
    from tokenizers import pre_tokenizers

    return word_tokenizer(WORDS, VOCABULARY, pre_tokenizers.WhitespaceSplit(), MOST_TOKENS)


def build_config() -> Qwen3Config:
    """The configuration of a model of 221,760 parameters: 2 layers, 4 query and 2 kv heads of 64."""
    names = ["Qwen3ForCausalLM"]
    return small_config(VOCABULARY, MOST_TOKENS, 1e6, head_dim=64, architectures=names, initializer_range=0.1)


def save_untrained(directory: str | Path) -> None:
    """Write the configuration, the generation config and the tokenizer, without weights: for `from_scratch`."""
    from transformers import GenerationConfig

    build_config().save_pretrained(directory)
    GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
