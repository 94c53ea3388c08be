r"""The synthetic tasks: problems that are generated, with worked answers, for a model small enough for two CPU cores.

A hash of a problem's numbers assigns the problem to one of three splits, so two splits never share one, and held-out
problems are the same under every seed. Two seeds of a split may share problems.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import add, mul, sub
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any, ClassVar

from sparse_rl.errors import UserError
from sparse_rl.files import usual_permissions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Problem = tuple[int, ...]
PAD_ID, EOS_ID = 0, 1
SPLITS = {"train": range(8), "calibration": range(8, 9), "evaluation": range(9, 10)}  # hash mod 10
MOST_MISSES = 100_000  # problems drawn in vain before a split counts as used up


def split_of(problem: Problem) -> str:
    digest = hashlib.blake2b(bytes(problem), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % 10
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


@dataclass(frozen=True)
class SyntheticTask:
    """A synthetic task: how its problems are drawn and written, and the shape of its model.

    words : vocabulary, which includes <pad>, <eos> and <unk>; it is padded to `vocabulary` tokens
    word : regular expression that cuts a text into words; by default every word that is not a digit, and numbers
    joined : True if nothing stands between the words of a text
    longest : maximum number of tokens of a sequence
    shape : settings of the model that differ from those of `config`
    """

    title: ClassVar[str]
    words: ClassVar[tuple[str, ...]]
    vocabulary: ClassVar[int]
    word: ClassVar[str] = ""
    joined: ClassVar[bool] = True
    longest: ClassVar[int] = 1024
    shape: ClassVar[dict[str, Any]] = {}
    shortage: ClassVar[tuple[str, str]] = ("problems", "")  # what may run out, and the mend

    def problem(self, rng: random.Random) -> Problem:
        raise NotImplementedError

    def rows(self, split: str, size: int, seed: int, with_response: bool = False) -> list[dict[str, Any]]:
        """Return rows {prompt, answer, ...}. Their problems do not depend on `with_response`.

        with_response : True adds a worked answer as `completion`, without the end-of-text token, which SFT appends
        """
        raise NotImplementedError

    def drawn(self, split: str, seed: int) -> Iterator[Problem | None]:
        """Yield problems endlessly, with None in place of a problem of another split."""
        if split not in SPLITS:
            raise UserError(f"{self.title}: unknown split {split!r}; one of {', '.join(SPLITS)}")
        rng = random.Random(f"{self.title.replace(' ', '-')}/{split}/{seed}")
        while True:
            problem = self.problem(rng)
            yield problem if split_of(problem) == split else None

    def problems(self, split: str, size: int, seed: int, exclude: Iterable[Problem] = ()) -> list[Problem]:
        """Draw `size` distinct problems of a split, none of them in `exclude`. Raises UserError if there are fewer."""
        problems: list[Problem] = []
        seen, misses = set(exclude), 0
        for problem in self.drawn(split, seed):
            if len(problems) == size:
                break
            if misses == MOST_MISSES:
                what, mend = self.shortage
                shortage = f"{self.title}: found only {len(problems)} distinct {split} {what}, {size} requested"
                raise UserError(f"{shortage}; {mend}")
            misses += 1
            if problem is not None and problem not in seen:
                seen.add(problem)
                problems.append(problem)
                misses = 0
        return problems

    # ---- tokenizer and model ------------------------------------------------------------------------------------

    @classmethod
    def splitter(cls) -> Any:
        from tokenizers import Regex, pre_tokenizers

        words = sorted((word for word in cls.words if word not in ("<pad>", "<eos>", "<unk>")), key=len, reverse=True)
        special = "|".join(re.escape(word) for word in words if not word.isdigit())
        return pre_tokenizers.Split(Regex(cls.word or rf"{special}|\d+|[\s\S]"), "isolated")

    @classmethod
    def tokenizer(cls) -> PreTrainedTokenizerFast:
        """Create the tokenizer: one token per word, lossless decoding, no chat template."""
        from tokenizers import Tokenizer, decoders, models
        from transformers import PreTrainedTokenizerFast

        every = [*cls.words, *(f"<unused{i}>" for i in range(cls.vocabulary - len(cls.words)))]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(every)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = cls.splitter()
        if cls.joined:
            tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            eos_token="<eos>",
            unk_token="<unk>",
            padding_side="left",
            clean_up_tokenization_spaces=False,
            model_max_length=cls.longest,
        )

    @classmethod
    def config(cls, **shape: Any) -> Qwen3Config:
        """Return the configuration of a model of about 0.1M parameters. shape : values that replace the defaults"""
        from transformers import Qwen3Config

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 32}  # 32: the least of vLLM's CPU attention
        settings: dict[str, Any] = {"rope_theta": 10000.0, **sizes, **cls.shape, **shape}
        return Qwen3Config(
            vocab_size=cls.vocabulary,
            max_position_embeddings=cls.longest,
            rope_parameters={"rope_type": "default", "rope_theta": settings.pop("rope_theta")},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
            dtype="float32",
            **settings,
        )

    @classmethod
    def untrained(cls, seed: int, **shape: Any) -> Qwen3ForCausalLM:
        """Create an untrained float32 model from `seed`, without changing the global generator."""
        import torch
        from transformers import GenerationConfig, Qwen3ForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(cls.config(**shape))
        model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
        return model.float()

    @classmethod
    def save_untrained(cls, directory: str | Path, seed: int | None = None, **shape: Any) -> None:
        """Write configuration, generation config and tokenizer; without a seed no weights, as for `from_scratch`."""
        if seed is None:
            from transformers import GenerationConfig

            cls.config(architectures=["Qwen3ForCausalLM"], **shape).save_pretrained(directory)
            GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID).save_pretrained(directory)
        else:
            cls.untrained(seed, **shape).save_pretrained(directory)
        cls.tokenizer().save_pretrained(directory)
        for weights in Path(directory).glob("*.safetensors"):
            usual_permissions(weights)


# ---- running_sum -----------------------------------------------------------------------------------------------------

SYMBOLS = ("<pad>", "<eos>", "\\boxed{", "}", *"0123456789=+;:[]?>,QN.", *"abcdefghijkl", *"ABCDEFGHIJKL", "<unk>")


@dataclass(frozen=True)
class RunningSum(SyntheticTask):
    r"""A task on which a model has to learn to cope with evictions: the quickstart's.

    A problem is a list of `n` labelled digits below `digits`. The answer writes the running sum mod 10, one line per
    label (label, digit, previous label's sum, own sum). Before each line but the last, with probability
    `note_probability`, the supervised text inserts a note that restates the unused labels and digits: a model that
    learns to write notes keeps the digits that it still needs in a small cache.

        Qa1b4c0d2e0f3g3h3? -> a1A1;b4A1B5;[c0d2e0f3g3h3]c0B5C5;[d2e0f3g3h3]d2C5D7;e0D7E7;f3E7F0;g3F0G3;h3G3H6;\boxed{6}
    """

    title = "running sum"
    words = SYMBOLS
    word = r"\\boxed\{|[\s\S]"
    vocabulary = 64  # padded, so that every id of the model decodes to some text; no padding token looks like an answer
    shortage = ("problems", "raise n or digits")
    n: int = 8
    digits: int = 5
    note_probability: float = 0.3

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
            before = f"{ascii_uppercase[i - 1]}{total}" if i else ""
            total = (total + digit) % 10
            parts.append(f"{ascii_lowercase[i]}{digit}{before}{ascii_uppercase[i]}{total};")
        return "".join(parts) + f"\\boxed{{{total}}}"

    def rows(self, split: str, size: int, seed: int, with_response: bool = False) -> list[dict[str, Any]]:
        notes, out = random.Random(f"running-sum/notes/{split}/{seed}"), list[dict[str, Any]]()
        for problem in self.problems(split, size, seed):
            out.append({"prompt": self.prompt(problem), "answer": self.answer(problem)})
            if with_response:
                out[-1]["completion"] = self.response(problem, notes)
        return out


def _restate(problem: Problem, first: int) -> str:
    return "".join(f"{ascii_lowercase[i]}{problem[i]}" for i in range(first, len(problem)))


def grade(text: str, answer: str) -> bool:
    r"""Return True if `text` (special tokens stripped) ends with \boxed{answer}."""
    match = re.search(r"\\boxed\{(\d)\}\Z", text)
    return match is not None and match.group(1) == answer


# ---- retrieval -------------------------------------------------------------------------------------------------------

NAMED = tuple(consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou")
DIGITS, UNSAID = tuple("0123456789"), 10  # a problem has a digit for each name, or UNSAID
SAYS_NOTHING = "the of and that it was for on are with they his from at by this have or one had but not what"
FILLER = tuple(SAYS_NOTHING.split())
KNOWN, ASKED = "known:", "asked:"  # the words before the document and before the questions
QUESTIONS = tuple(f"{name}?" for name in NAMED)
FACTS = tuple(f"{name}={digit}" for name in NAMED for digit in DIGITS)


@dataclass(frozen=True)
class Retrieval(SyntheticTask):
    """Facts in a document of one or two thousand tokens, and questions about them.

    A fact is one word, and so one token, that assigns a digit to a name. The document states each of `facts` facts
    `restated` times, in random order, with `filler` meaningless words after each statement. Each question asks for the
    digit of one name.

        known: ba=7 the of du=2 and for ba=7 it on du=2 from by asked: du?   ->   2 ba? 7

    A worked answer continues with questions about the other facts and their answers. So a model learns from all facts,
    and learns which questions may come. A small cache must hold one entry for each fact, unless an entry stands for
    several. The model has 221,760 parameters.
    """

    title = "retrieval"
    words = ("<pad>", "<eos>", "<unk>", KNOWN, ASKED, *DIGITS, *FILLER, *QUESTIONS, *FACTS)
    vocabulary = 1152
    longest = 4096
    shape = {"head_dim": 64, "rope_theta": 1e6, "initializer_range": 0.1}
    joined = False
    facts: int = 50
    restated: int = 7
    filler: int = 2

    def problem(self, rng: random.Random) -> Problem:
        """Draw a problem: a digit for each name of NAMED, or UNSAID if no fact is about the name."""
        named = set(rng.sample(range(len(NAMED)), self.facts))
        return tuple(rng.randrange(len(DIGITS)) if name in named else UNSAID for name in range(len(NAMED)))

    def document(self, problem: Problem, rng: random.Random) -> str:
        """Return a document of `document_tokens` tokens: every fact, `restated` times, in random order."""
        statements = [f"{NAMED[name]}={digit}" for name, digit in facts_of(problem).items()] * self.restated
        rng.shuffle(statements)
        return " ".join([KNOWN, *(word for fact in statements for word in (fact, *rng.choices(FILLER, k=self.filler)))])

    def questions(self, problem: Problem, rng: random.Random) -> list[tuple[str, str]]:
        pairs = [(f"{NAMED[name]}?", DIGITS[digit]) for name, digit in facts_of(problem).items()]
        rng.shuffle(pairs)
        return pairs

    def problems(self, split: str, size: int, seed: int, exclude: Iterable[Problem] = ()) -> list[Problem]:
        """Draw `size` problems of a split, which need not be distinct."""
        return list(islice((problem for problem in self.drawn(split, seed) if problem is not None), size))

    def rows(self, split: str, size: int, seed: int, with_response: bool = False) -> list[dict[str, Any]]:
        rng, out = random.Random(f"retrieval/documents/{split}/{seed}"), list[dict[str, Any]]()
        for problem in self.problems(split, size, seed):
            document, pairs = self.document(problem, rng), self.questions(problem, rng)
            out.append({"prompt": f"{document} {ASKED} {pairs[0][0]}", "answer": pairs[0][1], "context": document})
            if with_response:
                others = "".join(f" {question} {answer}" for question, answer in pairs[1:])
                out[-1]["completion"] = f" {pairs[0][1]}{others}"
        return out

    @classmethod
    def splitter(cls) -> Any:
        from tokenizers import pre_tokenizers

        return pre_tokenizers.WhitespaceSplit()

    @property
    def document_tokens(self) -> int:
        return 1 + self.facts * self.restated * (1 + self.filler)


def facts_of(problem: Problem) -> dict[int, int]:
    """Return the facts of a problem: index of the name -> digit."""
    return {name: digit for name, digit in enumerate(problem) if digit != UNSAID}


# ---- one_liners ------------------------------------------------------------------------------------------------------

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
CODE = (
    "<pad>", "<eos>", "<unk>", "f:", "\n", ";", "?", "=", "y", "n", ",", "[", "]", "a+", "a*", "-a", HEAD, "}[b]", OPEN,
    CLOSE, *(f"b{b}" for b in range(MOST_CASES)), *(f"{b}:" for b in range(MOST_CASES)), *(f" {a}>" for a in INPUTS),
    *map(str, VALUES),
)  # fmt: skip


@dataclass(frozen=True)
class OneLiners(SyntheticTask):
    r"""A task in which a tiny model writes a Python function that it has to find out from examples.

    The hidden function of `a` and `b` computes one small formula of `a` for each value of `b`. The prompt shows two
    examples for each value of `b`: `2>5` says that the result is 5 if `a` is 2. The worked answer has a step for each
    value of `b`. The step repeats the two examples, takes a formula that fits the first, and computes its result for
    the second; y or n says if this result is right. After n another formula follows, and after y the step ends with the
    formula. Before a step, a note in brackets may repeat the formulas so far and the examples that are not used yet: a
    model that writes notes keeps what it needs in a small cache. The program comes last, in a fenced block, and is
    tested on other values.

        f:b0 2>5 4>7;b1 3>6 1>2;     ->     b0 2>5 4>7?a+3=7y0:a+3,[0:a+3,b1 3>6 1>2;]b1 3>6 1>2?9-a=8n?a*2=2y1:a*2,
                                            ```
                                            def f(a,b):return {0:a+3,1:a*2}[b]
                                            ```

    There are `cases` values of `b`. Before each step but the first, a note has probability `note_probability`.
    """

    title = "one-liners"
    words = CODE
    vocabulary = 80
    shortage = ("functions", "raise cases")
    cases: int = 4
    note_probability: float = 0.3

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

    def rows(self, split: str, size: int, seed: int, with_response: bool = False) -> list[dict[str, Any]]:
        """Return rows {prompt, answer, tests}; the answer is the expression of the function."""
        inputs, work = (random.Random(f"one-liners/{what}/{split}/{seed}") for what in ("examples", "work"))
        out = list[dict[str, Any]]()
        for problem in self.problems(split, size, seed):
            shown = self.shown(inputs)
            row = {"prompt": self.prompt(problem, shown), "answer": self.expression(problem)}
            out.append({**row, "tests": [self.test(problem, shown)]})
            if with_response:
                out[-1]["completion"] = self.response(problem, shown, work)
        return out


def _example(b: int, formula: Callable[[int], int], pair: tuple[int, int]) -> str:
    return f"b{b}" + "".join(f" {a}>{formula(a)}" for a in pair)


def _examples(problem: Problem, shown: Sequence[tuple[int, int]], first: int) -> str:
    return "".join(f"{_example(b, FORMULAS[NAMES[problem[b]]], shown[b])};" for b in range(first, len(problem)))


def _ideas(index: int, shown: int, rng: random.Random) -> list[int]:
    """Return the formulas that are right for the value `shown`, in random order, up to the hidden one."""
    result = FORMULAS[NAMES[index]](shown)
    ideas = [idea for idea, name in enumerate(NAMES) if FORMULAS[name](shown) == result]
    rng.shuffle(ideas)
    return ideas[: ideas.index(index) + 1]


# ---- look_ups --------------------------------------------------------------------------------------------------------

KEYS = "abcdefgh"
ASK, ASKED_KEY = '{"name": "get", "arguments": {"key": "', '"}}'  # a call around its key
LOOK_UP_TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}<u>{{ m.content }}<eos>"
    "{%- elif m.role == 'tool' -%}<t>{{ m.content }}<eos>"
    "{%- else -%}<a>{%- generation -%}{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}"
    '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</call>'
    "{%- endfor -%}<eos>{%- endgeneration -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<a>{%- endif -%}"
)
LOOK_UP_RESPONSE: dict[str, Any] = {  # how transformers reads a turn
    "defaults": {"role": "assistant"},
    "start_anchor": "<a>",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


class LookUpTable:
    """The environment of the task look_ups, as TRL takes it: `reset` begins a conversation, and `get` is a tool."""

    def reset(self, table: str, **_: Any) -> None:
        self.table: dict[str, str] = json.loads(table)

    def get(self, key: str) -> str:
        """Look up a key.

        Args:
            key: The key to look up.

        Returns:
            A digit, and the next key.
        """
        return self.table[key]


@dataclass(frozen=True)
class LookUps(SyntheticTask):
    r"""A task of several turns: a chain of look-ups with a tool, and the sum mod 10 of the digits that it answers.

    Each answer of the tool is a digit and the next key. A model that writes the sum so far into its turns ("6;") needs
    only the newest turn; one that does not must look back at digits that a small cache may have evicted.

        c   ->   get(c)   4f   4;get(f)   2a   6;get(a)   3b   9;\boxed{9}

    In a worked answer, each turn but the first begins with the sum so far with probability `note_probability`.
    """

    title = "look-ups"
    words = (
        *("<pad>", "<eos>", "<unk>", "<u>", "<a>", "<t>", "<call>", "</call>", ASK, ASKED_KEY),
        *("\\boxed{", "}", ";", *DIGITS, *KEYS),
    )
    word = "|".join(map(re.escape, (ASK, ASKED_KEY, "<call>", "</call>", "<eos>", "<u>", "<a>", "<t>", "\\boxed{")))
    word += r"|[\s\S]"
    vocabulary = 64
    shortage = ("problems", "raise lookups")
    lookups: int = 4
    note_probability: float = 0.5

    @classmethod
    def tokenizer(cls) -> PreTrainedTokenizerFast:
        """Create the tokenizer, with a chat template that writes and reads tool calls."""
        tokenizer = super().tokenizer()
        tokenizer.chat_template, tokenizer.response_template = LOOK_UP_TEMPLATE, LOOK_UP_RESPONSE
        return tokenizer

    def problem(self, rng: random.Random) -> Problem:
        """Draw a problem: the keys of the chain, one more than look-ups, and the digit of each look-up."""
        keys = rng.sample(range(len(KEYS)), self.lookups + 1)
        return (*keys, *(rng.randrange(5) for _ in range(self.lookups)))

    def rows(self, split: str, size: int, seed: int, with_response: bool = False) -> list[dict[str, Any]]:
        """Return rows {prompt, answer, table}; the table is JSON, key -> digit and next key."""
        notes, out = random.Random(f"look-ups/notes/{split}/{seed}"), list[dict[str, Any]]()
        for problem in self.problems(split, size, seed):
            keys, digits = [KEYS[key] for key in problem[: self.lookups + 1]], problem[self.lookups + 1 :]
            table = {key: f"{digit}{after}" for key, digit, after in zip(keys, digits, keys[1:], strict=False)}
            row = {"prompt": keys[0], "answer": str(sum(digits) % 10), "table": json.dumps(table)}
            out.append({**row, "completion": self.response(table, digits, notes)} if with_response else row)
        return out

    def response(self, table: dict[str, str], digits: Sequence[int], rng: random.Random) -> list[dict[str, Any]]:
        """Return a worked answer as messages, with notes drawn from `rng`."""
        messages, total = list[dict[str, Any]](), 0
        for key, digit in zip(table, digits, strict=True):
            call = {"type": "function", "function": {"name": "get", "arguments": {"key": key}}}
            messages.append({"role": "assistant", "content": self._note(messages, total, rng), "tool_calls": [call]})
            messages.append({"role": "tool", "name": "get", "content": table[key]})
            total = (total + digit) % 10
        return [*messages, {"role": "assistant", "content": f"{self._note(messages, total, rng)}\\boxed{{{total}}}"}]

    def _note(self, messages: Sequence[Any], total: int, rng: random.Random) -> str:
        return f"{total};" if messages and rng.random() < self.note_probability else ""


TASKS: dict[str, type[SyntheticTask]] = {
    "running_sum": RunningSum,
    "retrieval": Retrieval,
    "one_liners": OneLiners,
    "look_ups": LookUps,
}
"""The task of each name of the key `task`."""
