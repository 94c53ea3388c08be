"""Retrieval: facts in a document of one or two thousand tokens, and questions about them.

A fact is one word, and so one token, that assigns a digit to a name. The document states each fact several times, in
random order, with meaningless filler words after each statement. Each question asks for the digit of one name.

    known: ba=7 the of du=2 and for ba=7 it on du=2 from by asked: du?   ->   2 ba? 7

A worked answer continues with questions about the other facts and their answers. So a model learns from all facts, and
learns which questions may come. A small cache must hold one entry for each fact, unless an entry stands for several.
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
DIGITS, UNSAID = tuple("0123456789"), 10  # a problem has a digit for each name, or UNSAID
SAYS_NOTHING = "the of and that it was for on are with they his from at by this have or one had but not what"
FILLER = tuple(SAYS_NOTHING.split())
KNOWN, ASKED = "known:", "asked:"  # the words before the document and before the questions
SPECIAL = ("<pad>", "<eos>", "<unk>")
QUESTIONS = tuple(f"{name}?" for name in NAMES)
FACTS = tuple(f"{name}={digit}" for name in NAMES for digit in DIGITS)
WORDS = (*SPECIAL, KNOWN, ASKED, *DIGITS, *FILLER, *QUESTIONS, *FACTS)
VOCABULARY = 1152  # padded size
MOST_TOKENS = 4096  # maximum number of tokens of a row


@dataclass(frozen=True)
class Retrieval:
    """A task with `facts` facts, each stated `restated` times, with `filler` words after each statement."""

    facts: int = 50
    restated: int = 7
    filler: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.facts <= len(NAMES) or self.restated < 1 or self.filler < 0:
            raise UserError(f"retrieval: facts 1 to {len(NAMES)}, restated >= 1 and filler >= 0, got {self}")

    def problem(self, rng: random.Random) -> Problem:
        """Draw a problem: a digit for each name of NAMES, or UNSAID if no fact is about the name."""
        named = set(rng.sample(range(len(NAMES)), self.facts))
        return tuple(rng.randrange(len(DIGITS)) if name in named else UNSAID for name in range(len(NAMES)))

    def document(self, problem: Problem, rng: random.Random) -> str:
        """Return a document of `document_tokens` tokens: every fact, `restated` times, in random order."""
        statements = [f"{NAMES[name]}={digit}" for name, digit in facts_of(problem).items()] * self.restated
        rng.shuffle(statements)
        return " ".join([KNOWN, *(word for fact in statements for word in (fact, *rng.choices(FILLER, k=self.filler)))])

    def questions(self, problem: Problem, rng: random.Random) -> list[tuple[str, str]]:
        pairs = [(f"{NAMES[name]}?", DIGITS[digit]) for name, digit in facts_of(problem).items()]
        rng.shuffle(pairs)
        return pairs

    @property
    def document_tokens(self) -> int:
        return 1 + self.facts * self.restated * (1 + self.filler)


def facts_of(problem: Problem) -> dict[int, int]:
    """Return the facts of a problem: index of the name -> digit."""
    return {name: digit for name, digit in enumerate(problem) if digit != UNSAID}


def problems(split: str, seed: int, task: Retrieval) -> Iterator[Problem]:
    """Yield problems of a split endlessly. Two splits never share a problem; two seeds of one split may share some."""
    return (problem for problem in drawn("retrieval", split, seed, task.problem) if problem is not None)


def rows(
    split: str, size: int, seed: int, with_response: bool = False, task: Retrieval | None = None
) -> list[dict[str, Any]]:
    """Return rows {prompt, answer}, where the prompt is a document and one question.

    If `with_response`, a row also has a worked answer as `completion`, without the end-of-text token.
    """
    task = task or Retrieval()
    rng = random.Random(f"retrieval/documents/{split}/{seed}")
    out: list[dict[str, Any]] = []
    for problem, _ in zip(problems(split, seed, task), range(size)):  # noqa: B905  # the problems have no end
        document, pairs = task.document(problem, rng), task.questions(problem, rng)
        row = {"prompt": f"{document} {ASKED} {pairs[0][0]}", "answer": pairs[0][1]}
        if with_response:
            others = "".join(f" {question} {answer}" for question, answer in pairs[1:])
            row["completion"] = f" {pairs[0][1]}{others}"
        out.append(row)
    return out


def build_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import pre_tokenizers

    return word_tokenizer(WORDS, VOCABULARY, pre_tokenizers.WhitespaceSplit(), MOST_TOKENS)


def build_config() -> Qwen3Config:
    """Return the configuration of a model of 221,760 parameters: 2 layers, 4 query and 2 kv heads of dimension 64."""
    names = ["Qwen3ForCausalLM"]
    return small_config(VOCABULARY, MOST_TOKENS, 1e6, head_dim=64, architectures=names, initializer_range=0.1)


def save_untrained(directory: str | Path) -> None:
    """Write the configuration, generation config and tokenizer without weights, for recipes with `from_scratch`."""
    from transformers import GenerationConfig

    build_config().save_pretrained(directory)
    GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
