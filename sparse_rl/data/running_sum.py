r"""Running sum: a task small enough for two CPU cores, on which a model still has to learn to cope with evictions.

A problem is a list of labelled digits. The answer writes the running sum mod 10, one line per label (label, digit,
previous label's sum, own sum). Before a line, the supervised text may insert a note that restates the unused labels and
digits: a model that learns to write notes keeps the digits that it still needs in a small cache.

    Qa1b4c0d2e0f3g3h3?   ->   a1A1;b4A1B5;[c0d2e0f3g3h3]c0B5C5;[d2e0f3g3h3]d2C5D7;e0D7E7;f3E7F0;g3F0G3;h3G3H6;\boxed{6}
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.data.synthetic import EOS_ID, PAD_ID, Problem, drawn, small_config, word_tokenizer
from sparse_rl.errors import UserError
from sparse_rl.files import usual_permissions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SYMBOLS = ("<pad>", "<eos>", "\\boxed{", "}", *"0123456789=+;:[]?>,QN.", *"abcdefghijkl", *"ABCDEFGHIJKL", "<unk>")
VOCABULARY = 64  # padded, so that every id of the model decodes to some text; no padding token looks like an answer
LONGEST = 1024  # tokens of a sequence


@dataclass(frozen=True)
class RunningSum:
    """`n` labelled digits below `digits`. Before each line but the last, a note has probability `note_probability`."""

    n: int = 8
    digits: int = 5
    note_probability: float = 0.3

    def __post_init__(self) -> None:
        if not 1 <= self.n <= 12 or not 2 <= self.digits <= 10 or not 0 <= self.note_probability <= 1:
            raise UserError(f"running sum: n 1 to 12, digits 2 to 10 and note_probability 0 to 1, got {self}")

    def problem(self, rng: random.Random) -> Problem:
        return tuple(rng.randrange(self.digits) for _ in range(self.n))

    def prompt(self, problem: Problem) -> str:
        return f"Q{_restate(problem, 0)}?"

    def answer(self, problem: Problem) -> str:
        return str(sum(problem) % 10)

    def response(self, problem: Problem, rng: random.Random) -> str:
        """Return a worked answer with notes drawn from `rng`, without the end-of-text token."""
        parts, total = [], 0
        for i, digit in enumerate(problem):
            if len(problem) - i >= 2 and rng.random() < self.note_probability:
                parts.append(f"[{_restate(problem, i)}]")
            before = f"{_upper(i - 1)}{total}" if i else ""
            total = (total + digit) % 10
            parts.append(f"{_lower(i)}{digit}{before}{_upper(i)}{total};")
        return "".join(parts) + f"\\boxed{{{total}}}"

    @property
    def prompt_tokens(self) -> int:
        return 2 * self.n + 2

    @property
    def max_response(self) -> int:
        """Number of tokens of the longest worked answer (a note before every line but the last), with end-of-text."""
        notes = sum(2 * (self.n - i) + 2 for i in range(self.n - 1))
        return notes + 5 + 7 * (self.n - 1) + 3 + 1


def _lower(i: int) -> str:
    return chr(ord("a") + i)


def _upper(i: int) -> str:
    return chr(ord("A") + i)


def _restate(problem: Problem, first: int) -> str:
    return "".join(f"{_lower(i)}{problem[i]}" for i in range(first, len(problem)))


def grade(text: str, answer: str) -> bool:
    r"""Return True if `text` (special tokens stripped) ends with \boxed{answer}."""
    match = re.search(r"\\boxed\{(\d)\}\Z", text)
    return match is not None and match.group(1) == answer


def generate_problems(
    size: int, seed: int, exclude: Iterable[Problem] = (), *, split: str = "train", task: RunningSum | None = None
) -> list[Problem]:
    """Draw `size` distinct problems of a split, none of them in `exclude`. Raises UserError if there are too few."""
    problems: list[Problem] = []
    seen, misses = set(exclude), 0
    for problem in drawn("running-sum", split, seed, (task or RunningSum()).problem):
        if len(problems) == size:
            break
        if misses == 100_000:
            shortage = f"found only {len(problems)} distinct {split} problems, {size} requested"
            raise UserError(f"running sum: {shortage}; raise n or digits")
        misses += 1
        if problem is not None and problem not in seen:
            seen.add(problem)
            problems.append(problem)
            misses = 0
    return problems


def rows(
    split: str, size: int, seed: int, with_response: bool = False, task: RunningSum | None = None
) -> list[dict[str, Any]]:
    """Return rows {prompt, answer}; if `with_response`, also a worked `completion` without the end-of-text token.

    TRL's SFTTrainer appends that token to a completion that lacks it, so each completion has exactly one.
    """
    task = task or RunningSum()
    problems = generate_problems(size, seed, split=split, task=task)
    notes = random.Random(f"running-sum/notes/{split}/{seed}")  # separate, so that responses do not change the problems
    out: list[dict[str, Any]] = []
    for problem in problems:
        row = {"prompt": task.prompt(problem), "answer": task.answer(problem)}
        if with_response:
            row["completion"] = task.response(problem, notes)
        out.append(row)
    return out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Create the tokenizer: one token per character and one for `\\boxed{`, lossless decoding, no chat template."""
    from tokenizers import Regex, decoders, pre_tokenizers

    splitter = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), "isolated")
    return word_tokenizer(SYMBOLS, VOCABULARY, splitter, LONGEST, decoders.Fuse())


def build_model(seed: int, **shape: int) -> Qwen3ForCausalLM:
    """Create an untrained float32 Qwen3 from `seed`, without changing the global generator.

    shape : values that replace the defaults of `small_config`
    """
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(small_config(VOCABULARY, LONGEST, 10000.0, **shape))
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model.float()


def save_untrained(directory: str | Path, seed: int, **shape: int) -> None:
    """Write the untrained model, its generation config and its tokenizer as a Hugging Face directory."""
    build_model(seed, **shape).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    for weights in Path(directory).glob("*.safetensors"):
        usual_permissions(weights)
