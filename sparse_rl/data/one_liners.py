r"""One-liners: a task in which a tiny model writes a Python function that it has to find out from examples.

The hidden function of `a` and `b` computes one small formula of `a` for each value of `b`. The prompt shows two examples
for each value of `b`: `2>5` says that the result is 5 if `a` is 2. The worked answer takes one value of `b` after the
other. It repeats the two examples, takes a formula that fits the first, and computes its result for the second; y or n
says if that result is right. After y it writes down the formula, and after n it tries another one. Before a line, a
note in brackets may repeat the formulas found so far and the examples not used yet: a model that learns to write notes
keeps in a small cache what it still needs. The program comes last, in a fenced block, and is tested on other values.

    f:b0 2>5 4>7;b1 3>6 1>2;        ->        b0 2>5 4>7?a+3=7y0:a+3,[0:a+3,b1 3>6 1>2;]b1 3>6 1>2?9-a=8n?a*2=2y1:a*2,
                                              ```
                                              def f(a,b):return {0:a+3,1:a*2}[b]
                                              ```
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.data.synthetic import EOS_ID, PAD_ID, Problem, drawn, small_config, word_tokenizer
from sparse_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

INPUTS = range(7)  # values of `a`
MOST_CASES = 6
FORMULAS: dict[str, Callable[[int], int]] = {
    **{f"a+{k}": lambda a, k=k: a + k for k in range(1, 10)},
    **{f"a*{k}": lambda a, k=k: a * k for k in range(2, 5)},
    **{f"{k}-a": lambda a, k=k: k - a for k in range(6, 16)},
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
