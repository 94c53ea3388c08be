r"""One-liners: a task in which a tiny model writes a Python function that it has to find out from examples.

The hidden function of `a` and `b` computes one small formula of `a` for each value of `b`. The prompt shows two
examples for each value of `b`: `2>5` says that the result is 5 if `a` is 2. The worked answer has a step for each value
of `b`. The step repeats the two examples, takes a formula that fits the first, and computes its result for the second;
y or n says if this result is right. After n another formula follows, and after y the step ends with the formula. Before
a step, a note in brackets may repeat the formulas so far and the examples that are not used yet: a model that writes
notes keeps what it needs in a small cache. The program comes last, in a fenced block, and is tested on other values.

    f:b0 2>5 4>7;b1 3>6 1>2;        ->        b0 2>5 4>7?a+3=7y0:a+3,[0:a+3,b1 3>6 1>2;]b1 3>6 1>2?9-a=8n?a*2=2y1:a*2,
                                              ```
                                              def f(a,b):return {0:a+3,1:a*2}[b]
                                              ```
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add, mul, sub
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.data.synthetic import EOS_ID, PAD_ID, Problem, drawn, small_config, word_tokenizer
from sparse_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

INPUTS = range(7)  # values of `a`
MOST_CASES = 6
FORMULAS: dict[str, Callable[[int], int]] = {
    **{f"a+{k}": partial(add, k) for k in range(1, 10)},
    **{f"a*{k}": partial(mul, k) for k in range(2, 5)},
    **{f"{k}-a": partial(sub, k) for k in range(6, 16)},
}
NAMES = tuple(FORMULAS)
VALUES = range(max(formula(a) for formula in FORMULAS.values() for a in INPUTS) + 1)
HEAD, OPEN, CLOSE = "def f(a,b):return {", "\n```\n", "\n```"
WORDS = (
    "<pad>", "<eos>", "<unk>", "f:", "\n", ";", "?", "=", "y", "n", ",", "[", "]", "a+", "a*", "-a", HEAD, "}[b]", OPEN,
    CLOSE, *(f"b{b}" for b in range(MOST_CASES)), *(f"{b}:" for b in range(MOST_CASES)), *(f" {a}>" for a in INPUTS),
    *map(str, VALUES),
)  # fmt: skip
VOCABULARY = 80  # padded size
LONGEST = 1024  # tokens of a sequence


@dataclass(frozen=True)
class OneLiners:
    """`cases` values of `b`. Before each step but the first, a note has probability `note_probability`."""

    cases: int = 4
    note_probability: float = 0.3

    def __post_init__(self) -> None:
        if not 1 <= self.cases <= MOST_CASES or not 0 <= self.note_probability <= 1:
            raise UserError(f"one-liners: cases 1 to {MOST_CASES} and note_probability 0 to 1, got {self}")

    def problem(self, rng: random.Random) -> Problem:
        """Draw a problem: for each value of `b`, the index of its formula in NAMES."""
        return tuple(rng.randrange(len(NAMES)) for _ in range(self.cases))

    def shown(self, rng: random.Random) -> list[tuple[int, int]]:
        """Draw the two values of `a` that the examples of each value of `b` have."""
        return [(first, second) for first, second in (rng.sample(INPUTS, 2) for _ in range(self.cases))]

    def prompt(self, problem: Problem, shown: Sequence[tuple[int, int]]) -> str:
        return f"f:{_examples(problem, shown, 0)}\n"

    def expression(self, problem: Problem) -> str:
        entries = ",".join(f"{b}:{NAMES[index]}" for b, index in enumerate(problem))
        return f"{{{entries}}}[b]"

    def test(self, problem: Problem, shown: Sequence[tuple[int, int]]) -> str:
        """Return a test with one assertion for each value of `b`, about all values of `a` that are not shown."""
        lines = []
        for b, (index, pair) in enumerate(zip(problem, shown, strict=True)):
            hidden = [a for a in INPUTS if a not in pair]
            results = [FORMULAS[NAMES[index]](a) for a in hidden]
            lines.append(f"assert [f(a, {b}) for a in {hidden}] == {results}")
        return "\n".join(lines)

    def response(self, problem: Problem, shown: Sequence[tuple[int, int]], rng: random.Random) -> str:
        """Return a worked answer, with notes and wrong ideas drawn from `rng`, without the end-of-text token."""
        parts = []
        for b, (index, (first, second)) in enumerate(zip(problem, shown, strict=True)):
            if b and rng.random() < self.note_probability:
                parts.append(self.note(problem, shown, b))
            parts.append(_example(b, FORMULAS[NAMES[index]], (first, second)))
            for idea in _ideas(index, first, rng):
                verdict = "y" if idea == index else "n"
                parts.append(f"?{NAMES[idea]}={FORMULAS[NAMES[idea]](second)}{verdict}")
            parts.append(f"{b}:{NAMES[index]},")
        return "".join(parts) + f"{OPEN}{HEAD}{self.expression(problem)[1:]}{CLOSE}"

    def note(self, problem: Problem, shown: Sequence[tuple[int, int]], first: int) -> str:
        """Return a note before the step of `b` = `first`: the formulas before it, and the examples from there on."""
        formulas = "".join(f"{b}:{NAMES[problem[b]]}," for b in range(first))
        return f"[{formulas}{_examples(problem, shown, first)}]"

    @property
    def prompt_tokens(self) -> int:
        return 2 + 6 * self.cases


def _example(b: int, formula: Callable[[int], int], pair: tuple[int, int]) -> str:
    return f"b{b}" + "".join(f" {a}>{formula(a)}" for a in pair)


def _examples(problem: Problem, shown: Sequence[tuple[int, int]], first: int) -> str:
    return "".join(f"{_example(b, FORMULAS[NAMES[problem[b]]], shown[b])};" for b in range(first, len(problem)))


def _ideas(index: int, shown: int, rng: random.Random) -> list[int]:
    """Return formulas that give the right result for the value `shown`, in random order up to the right formula."""
    result = FORMULAS[NAMES[index]](shown)
    ideas = [idea for idea, name in enumerate(NAMES) if FORMULAS[name](shown) == result]
    rng.shuffle(ideas)
    return ideas[: ideas.index(index) + 1]


def rows(
    split: str, size: int, seed: int, with_response: bool = False, task: OneLiners | None = None
) -> list[dict[str, Any]]:
    """Return rows {prompt, answer, tests} with distinct functions; the answer is the expression of the function.

    If `with_response`, a row also has a worked answer as `completion`, without the end-of-text token. Two splits never
    share a function. Raises UserError if there are too few functions.
    """
    task = task or OneLiners()
    inputs = random.Random(f"one-liners/examples/{split}/{seed}")
    work = random.Random(f"one-liners/work/{split}/{seed}")  # separate, so that responses do not change the problems
    out: list[dict[str, Any]] = []
    seen, misses = set[Problem](), 0
    for problem in drawn("one-liners", split, seed, task.problem):
        if len(out) == size:
            break
        if misses == 100_000:
            shortage = f"found only {len(out)} distinct {split} functions, {size} requested"
            raise UserError(f"one-liners: {shortage}; raise cases")
        misses += 1
        if problem is None or problem in seen:
            continue
        seen.add(problem)
        misses = 0
        shown = task.shown(inputs)
        row = {
            "prompt": task.prompt(problem, shown),
            "answer": task.expression(problem),
            "tests": [task.test(problem, shown)],
        }
        if with_response:
            row["completion"] = task.response(problem, shown, work)
        out.append(row)
    return out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Create the tokenizer: one token per word of WORDS, lossless decoding, no chat template."""
    from tokenizers import Regex, decoders, pre_tokenizers

    special = "|".join(re.escape(word) for word in sorted(WORDS[3:], key=len, reverse=True) if not word.isdigit())
    splitter = pre_tokenizers.Split(Regex(rf"{special}|\d+|[\s\S]"), "isolated")
    return word_tokenizer(WORDS, VOCABULARY, splitter, LONGEST, decoders.Fuse())


def build_config() -> Qwen3Config:
    """Return the configuration of a model of about 0.1M parameters, the shape of the quickstart's model."""
    return small_config(VOCABULARY, LONGEST, 10000.0, architectures=["Qwen3ForCausalLM"])


def save_untrained(directory: str | Path) -> None:
    """Write the configuration, generation config and tokenizer without weights, for recipes with `from_scratch`."""
    from transformers import GenerationConfig

    build_config().save_pretrained(directory)
    GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
