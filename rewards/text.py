r"""Finds the final part of a completion and the answer that is marked in it, and checks the inputs of a reward. Then
the rewards that only read a text or count tokens: boxed, format, letter, short_answer, soft_overlong and repetition.

docs/rewards.md has a table of the rules. Every function takes time linear in the text's length.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, get_args

# \boxed{...}, or \boxed 2 without braces, which ends with the formula or the number
BOX = re.compile(
    r"\\boxed\s*(?:(?P<open>\{)|(?P<bare>(?![a-zA-Z])[^$\s{}]{1,60}?(?=\$|\\\)|\\\])|-?\d(?:[\d.,/]{0,60}\d)?))"
)
MARK = re.compile(rf"{BOX.pattern}|<answer>")  # of an answer
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped character is skipped: \{ is not a brace
_PLACEHOLDER = re.compile(  # \boxed{}, \boxed{...}, \boxed{\text{your answer}}
    r"(?:[\s.…_?~{}<>]|\\[ ,;:!]|\\(?:[lcv]?dots|q?quad|square|boxed|text)(?![a-zA-Z])|\b(?:your|final|answer)\b)*",
    re.IGNORECASE,
)
_GAP = r"(?:[\s$]|\\[()\[\]])*"
_JOINED = re.compile(rf"{_GAP}(?:[,;]{_GAP}(?:(?:and|or)\b)?|(?:and|or)\b){_GAP}")  # \boxed{3}, \boxed{5} and \boxed{7}
HEADING = re.compile(  # Answer: 42, **Answer** 42, or the line "### Final answer" above the answer
    r"(?:(?<!wrong )(?<!incorrect )\banswer[*_ \t]*(?:is\b[*_ \t]*)?[:：]"
    r"|^[#*_> \t]*(?:(?:the|final|correct)[ \t]+)*answer(?:\*\*|__|[ \t]*$))[*_\s]*(\S.*)",
    re.IGNORECASE | re.MULTILINE,
)
_CONTAINER = re.compile(r"""\[\s*["']|\{\s*["'][^"']*["']\s*:""")
_ALONE = re.compile(rf"""(?:\[|{_CONTAINER.pattern})\s*["']?([^"']*)["']?\s*[\]}}]""")


def final_parts(completions: Sequence[Any], columns: Mapping[str, Any]) -> list[str]:
    """Return the text of each completion that follows its reasoning: all that a reward may read.

    The reasoning ends at the last ``</think>``. If a ``<think>`` is never closed, nothing follows it; this includes a
    ``<think>`` at the end of the prompt.

    columns : the columns that the reward is called with; see `opened_thinking`
    """
    parts = []
    for completion, opened in zip(completions, opened_thinking(completions, columns), strict=True):
        _, closed, part = completion_text(completion).rpartition("</think>")
        parts.append("" if "<think>" in part or (opened and not closed) else part)
    return parts


def opened_thinking(completions: Sequence[Any], columns: Mapping[str, Any]) -> list[bool]:
    """Return True for each completion whose prompt ends with ``<think>``, so that it begins as reasoning.

    columns : `prompts` are texts or messages; `prompt_ends`, if present, are the last characters of each prompt as the
        model reads it, after the chat template
    """
    opened = [False] * len(completions)
    for place, completion in enumerate(completions):
        if isinstance(completion, str) or not (completion and completion[-1].get("reasoning_content")):
            for prompts in filter(None, (columns.get("prompts"), columns.get("prompt_ends"))):
                end = prompts[place] if isinstance(prompts[place], str) else completion_text(prompts[place][-1:])
                opened[place] |= end.rstrip().endswith("<think>")
    return opened


def completion_text(completion: Any) -> str:
    """Return the text of one completion: a string, or the last message of the assistant in a conversation. The content
    of a message may be a string, None (a tool call without text) or a list of blocks, whose texts are joined."""
    if isinstance(completion, str):
        return completion
    assistant_messages = [message for message in completion if message.get("role", "assistant") == "assistant"]
    content = assistant_messages[-1].get("content") if assistant_messages else None
    if isinstance(content, list):
        return "".join(block.get("text") or "" for block in content)
    return content or ""


def boxes(text: str, marks: re.Pattern[str] = BOX) -> Iterator[tuple[re.Match[str], int, str | None]]:
    r"""Yield each ``\boxed{...}`` that is no placeholder such as ``\boxed{}``, from the last to the first.

    A box is (its beginning, index of its end, its content). The content is None if the box never closes.
    """
    for mark in reversed(list(marks.finditer(text))):
        if mark["bare"]:
            content, end = mark["bare"], mark.end()
        else:
            end = text.find("</answer>", mark.end()) if mark[0] == "<answer>" else closing(text, mark.end())
            content = text[mark.end() : end] if end >= 0 else None
        if content is None or len(content) > 100 or not _PLACEHOLDER.fullmatch(content):
            yield mark, end + 1, content


def last_boxed(text: str, marks: re.Pattern[str] = BOX) -> str | None:
    """Return the content of the last box that is no placeholder. None: there is none. An empty text: it never closes.
    Boxes that only commas, "and" or "or" separate are one list: their contents are joined by commas."""
    contents: list[str] = []
    following = 0
    for mark, end, content in boxes(text, marks):
        if contents and (mark[0] == "<answer>" or not _JOINED.fullmatch(text, end, following)):
            break
        contents.append(content or "")
        if not content:
            break
        following = mark.start()
    return ", ".join(reversed(contents)) if contents else None


def closing(text: str, start: int) -> int:
    """Return the index of the brace that closes the brace before `start`, or -1 if no brace does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return -1


def gold_text(gold: Any) -> str | None:
    r"""Return a gold answer as bare text: a number becomes a string, and a ``\boxed{...}`` is replaced by its content.

    None means that there is no answer: a missing value, an empty text, or a box that is empty or never closed. A list
    or a mapping with a single value, also as JSON or Python writes it (["5"]), stands for the value.
    """
    text = "" if gold is None else str(gold).strip()
    if _CONTAINER.match(text):
        alone = _ALONE.fullmatch(text)
        text = alone[1].replace(r"\\", "\\") if alone else ""
    answer = last_boxed(text) if "\\boxed" in text else text
    return (answer or "").strip() or None


def require_column(
    reward: str, column: str, values: Sequence | None, completions: Sequence, present: Iterable[str]
) -> Sequence:
    """Return the values of a column, or raise ValueError if the column is missing or not as long as `completions`.

    present : names of the other columns of the data, for the error
    """
    if values is None:
        raise ValueError(
            f"the {reward!r} reward needs a column {column!r}, but the data has {sorted(present) or 'no other'}: "
            f"set data.columns.{column} to the name of the column of your dataset that holds it"
        )
    if len(values) != len(completions):
        raise ValueError(f"the {reward!r} reward got {len(completions)} completions but {len(values)} {column!r}")
    return values


def require_whole(name: str, value: Any, least: int, most: int | None = None, limit: str = "") -> int:
    """Return `value`, or raise ValueError if it is no whole number from `least` to `most`. limit : name of `most`"""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"from {least} to {limit} ({most})"
        raise ValueError(f"{name} must be a whole number {bounds}, not {value!r}")
    return value


def require_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return value


def require_seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
    return value


class _AnswerReward:
    """Scores 1.0 if the final part of a completion states the gold answer, else 0.0; None without a gold answer."""

    __name__ = ""
    golds = ("answer",)
    gold: Callable[[Any], str | None] = staticmethod(gold_text)
    stated: Callable[[str], str | None]  # the answer in a final part

    def __call__(
        self, completions: Sequence[Any], answer: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        golds = map(self.gold, require_column(self.__name__, "answer", answer, completions, columns))
        stated = map(self.stated, final_parts(completions, columns))
        return [
            None if not gold else float((text or "").strip() == gold) for gold, text in zip(golds, stated, strict=True)
        ]


class BoxedReward(_AnswerReward):
    r"""Scores 1.0 if the content of the last ``\boxed{...}``, without outer white space, is the gold answer, else 0.0.

    A box that is never closed scores 0.0. If there is no gold answer (None or empty), the reward is None.
    """

    __name__ = "boxed"
    stated = staticmethod(last_boxed)


class FormatReward:
    r"""Scores 1.0 if the completion has the required format, else 0.0.

    style : ``boxed`` requires that the final part has exactly one ``\boxed{...}``, closed and no placeholder. ``think``
        is TRL's `think_format_reward`: the text must start with ``<think>``, which the prompt may have written, and
        contain the closing tag
    """

    __name__ = "format"

    def __init__(self, *, style: str = "boxed") -> None:
        self.style = require_choice("style", style, ("boxed", "think"))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if self.style == "boxed":
            contents = [[box[2] for box in islice(boxes(part), 2)] for part in final_parts(completions, columns)]
            return [float(len(one) == 1 and one != [None]) for one in contents]
        from trl.rewards import think_format_reward

        opened = opened_thinking(completions, columns)
        texts = ["<think>" * begun + completion_text(text) for begun, text in zip(opened, completions, strict=True)]
        return list(think_format_reward([[{"role": "assistant", "content": text}] for text in texts]))


FAR = 100  # number of characters that are read after a phrase

_SPACE = re.compile(r"\\[ ,;:!]|\\q?quad(?![a-zA-Z])|~")
_STYLE = re.compile(r"\\(?:text|math)[a-zA-Z]*|\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[()\[\]]|[$*`\"“”'‘’]")
_SPACES = r"[\s}]"  # the brace ends a style, as in \textbf{Answer:} C
_PHRASE = re.compile(
    r"(?<!wrong )(?<!incorrect )\b(?:answer|(?:correct|right|best)\s+(?:option|choice|letter))"
    rf"(?:\s+(?:option|choice|letter))?(?:\s+to\s+(?:the|this)\s+(?:question|problem))?{_SPACES}*"
    rf"(?:[:：=]|\b(?:is|(?:must|should|would)\s+be)\b){_SPACES}*[:：]?(?:\s*(?:therefore|thus|hence|indeed)\b,?)?",
    re.IGNORECASE,
)
_LETTER = re.compile(
    r"\s*(?:(?:the\s+)?(?i:option|choice|letter)\s*:?\s*)?"
    r"(?:[(\[]\s*([A-Z])\s*[)\]](?![-A-Za-z]|\s*\?)"  # (C), but not (E)-but-2-ene
    r"|([A-Z])(?=\s*(?:$|\n|\)(?!-)|[.:,;!—–](?!\w)|\s[-(\[]|\s(?:because|since|as|due)\b)))"  # C, but not C-H
    r"(?!\W*(?:(?:or|and)\b\W*(?:(?:option|choice)\s+)?[(\[]?|[,;/&]\s*[(\[]?)[A-Z](?![\w-]|\s+[a-z]))"  # not B or C
)
_ONLY_LETTER = re.compile(r"(?i:option\s+|choice\s+)?[(\[]?[A-Z](?:[)\].:](?:\s.{0,100})?)?")
_GOLD = re.compile(r"\(?([A-Z])[).:]?")


def stated_letter(text: str) -> str | None:
    """Return the letter of the last statement that begins with one, or None."""
    answer = _STYLE.sub("", _SPACE.sub(" ", text)).strip()
    statements = [(phrase.end(), answer[phrase.end() : phrase.end() + FAR]) for phrase in _PHRASE.finditer(answer)]
    statements += [(mark.end(), last_boxed(answer, MARK) or "") for mark, *_ in islice(boxes(answer, MARK), 1)]
    statements += [(heading.start(1), heading[1]) for heading in HEADING.finditer(answer)]
    statements += [(0, answer)] * bool(_ONLY_LETTER.fullmatch(answer))
    for _, statement in sorted(statements, reverse=True):
        if letter := _LETTER.match(re.sub("[{}]", "", statement)):  # at its beginning, and no other letter
            return letter[1] or letter[2]
    return None


class LetterReward(_AnswerReward):
    r"""Scores 1.0 if the letter that a completion states last is the letter of the gold answer, else 0.0.

    A statement is a mark, a heading or a phrase before an upper-case letter: C, (C), ``\text{C}``, option C, C) 12 m.
    Without one, it scores 0.0. The reward is None if the gold answer is not a letter (C, (C) or C.).
    """

    __name__ = "letter"
    gold = staticmethod(lambda value: (_GOLD.fullmatch(gold_text(value) or "") or [None, None])[1])
    stated = staticmethod(stated_letter)


LONG_LINE, SHORT_SENTENCE = 100, 10  # characters
Match = Literal["exact", "contained"]
Unanswerable = Literal["wrong", "left_out"]
_SENTENCE_END = re.compile(r"[.!?](?=\s)")
_FIRST_HEADING = re.compile(r"[#*_ ]*(?:(?:the|final) )*answer[*_ ]*(?:[:：]|\*\*|\n)[*_\s]*", re.IGNORECASE)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def short_answer(completion: str) -> str:
    """Return the answer in the last box or ``<answer>``, or else the first line of a completion, without "Answer:".
    Of a line of more than LONG_LINE characters, it is the first sentence, unless that has at most SHORT_SENTENCE."""
    text = last_boxed(completion, MARK)
    if text is None:
        text = completion.lstrip()
        heading = _FIRST_HEADING.match(text)
        text = text[heading.end() :] if heading else text
    line = text.lstrip().partition("\n")[0].rstrip()
    end = _SENTENCE_END.search(line) if len(line) > LONG_LINE else None
    return line[: end.start()] if end and end.start() > SHORT_SENTENCE else line


def normalised(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and articles, and with white space collapsed."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


class ShortAnswerReward:
    """Scores 1.0 if the short answer of a completion matches one of the true answers after normalisation, else 0.0.

    The rules are those of LuKA's published script, whose "exact match" is `match: contained` here. Answers are
    normalised as in SQuAD's official evaluation. The column `answers` holds a list of true answers for each problem.

    match : `exact`: the two answers are equal; `contained`: one of them contains the other as a substring, as heart
        contains art
    unanswerable : score if the list of true answers is empty: `wrong` (0.0 for every completion) or `left_out` (None)
    """

    __name__ = "short_answer"
    golds = ("answers",)

    def __init__(self, *, match: Match = "exact", unanswerable: Unanswerable = "wrong") -> None:
        self.match = require_choice("match", match, get_args(Match))
        self.unanswerable = require_choice("unanswerable", unanswerable, get_args(Unanswerable))

    def __call__(
        self, completions: Sequence[Any], answers: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        answers = require_column("short_answer", "answers", answers, completions, columns)
        return list(map(self._score, final_parts(completions, columns), answers))

    def _score(self, part: str, answers: Any) -> float | None:
        if answers is not None and (isinstance(answers, str) or not isinstance(answers, Sequence)):
            raise ValueError(f"answers must be a list of texts for each completion, not {type(answers).__name__}")
        if not answers:
            return 0.0 if self.unanswerable == "wrong" else None
        prediction = normalised(short_answer(part))
        true_answers = [text for text in (normalised(str(answer)) for answer in answers) if text]
        if self.match == "exact":
            return float(prediction in true_answers)
        return float(prediction != "" and any(prediction in text or text in prediction for text in true_answers))


class SoftOverlongReward:
    """Punishes completions whose length is close to the limit: TRL's soft overlong punishment (DAPO, eq. 13).

    The reward is 0.0 up to max_completion_len - soft_punish_cache tokens, and then falls linearly to -1.0 at
    max_completion_len tokens.

    max_completion_len : limit on the number of tokens, normally the recipe's max_completion_length
    soft_punish_cache : number of tokens before the limit at which the punishment begins; 0 punishes only completions
        that are longer than the limit
    """

    __name__ = "soft_overlong"

    def __init__(self, *, max_completion_len: int, soft_punish_cache: int) -> None:
        self.max_completion_len = most = require_whole("max_completion_len", max_completion_len, 1)
        self.soft_punish_cache = require_whole("soft_punish_cache", soft_punish_cache, 0, most, "max_completion_len")

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        ids = require_column("soft_overlong", "completion_ids", completion_ids, completions, columns)
        from trl.rewards import get_soft_overlong_punishment

        return get_soft_overlong_punishment(self.max_completion_len, self.soft_punish_cache)(completion_ids=ids)


class RepetitionReward:
    """Scores max_penalty times the fraction of the completion's n-grams of tokens that are repeats.

    It is TRL's penalty (Demystifying Long CoT, appendix C.2).

    ngram_size : number of tokens per n-gram; a completion with fewer tokens scores 0.0
    max_penalty : lowest possible reward, at most 0
    """

    __name__ = "repetition"

    def __init__(self, *, ngram_size: int = 3, max_penalty: float = -1.0) -> None:
        if type(max_penalty) not in (int, float) or not -float("inf") < max_penalty <= 0:
            raise ValueError(f"max_penalty must be a number <= 0, not {max_penalty!r}")
        self.ngram_size, self.max_penalty = require_whole("ngram_size", ngram_size, 1), max_penalty

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        rows = require_column("repetition", "completion_ids", completion_ids, completions, columns)
        # Tensors hash by identity, so n-grams of tensors would never repeat.
        ids = [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
        from trl.rewards import get_repetition_penalty_reward

        return get_repetition_penalty_reward(self.ngram_size, self.max_penalty)(completion_ids=ids)


class RecordedReward:
    """Returns the reward that is stored with a recorded rollout (data.traces), by `sparse-rl rollout --score` or by a
    program of your own, in the key `reward` of its line."""

    __name__ = "recorded"

    def __call__(
        self, completions: Sequence[Any], reward: Sequence[float | None] | None = None, **columns: Any
    ) -> list[float | None]:
        return list(require_column("recorded", "reward", reward, completions, columns))
