"""The reward `short_answer` checks whether the first line of a completion is a true answer of a few words.

The rules are from the published evaluation script of LuKA, whose "exact match" is `match: contained` here. Answers are
normalised as in SQuAD's official evaluation.
"""

import re
import string
from collections.abc import Sequence
from typing import Any, Literal, get_args

from rewards.text import completion_text, require_column

LONG_LINE, SHORT_SENTENCE = 100, 10  # characters
Match = Literal["exact", "contained"]
Unanswerable = Literal["wrong", "left_out"]
_SENTENCE_END = re.compile(r"[.!?](?=\s)")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def short_answer(completion: str) -> str:
    """Return the first line of a completion.

    If the line has more than LONG_LINE characters, return only its first sentence, unless this sentence has at most
    SHORT_SENTENCE characters.
    """
    line = completion.lstrip().partition("\n")[0].rstrip()
    end = _SENTENCE_END.search(line) if len(line) > LONG_LINE else None
    return line[: end.start()] if end and end.start() > SHORT_SENTENCE else line


def normalised(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and articles, and with white space collapsed."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


class ShortAnswerReward:
    """Scores 1.0 if the short answer of a completion matches one of the true answers after normalisation, else 0.0.

    The true answers of each problem are a list of texts in the column `answers`. An answer that is empty after
    normalisation does not match any text.

    match : `exact`: the two answers are equal; `contained`: one of them contains the other as a substring, as heart
        contains art
    unanswerable : score if the list of true answers is empty: `wrong` (0.0 for every completion) or `left_out` (None)
    """

    __name__ = "short_answer"

    def __init__(self, *, match: Match = "exact", unanswerable: Unanswerable = "wrong") -> None:
        for name, value, choices in (
            ("match", match, get_args(Match)),
            ("unanswerable", unanswerable, get_args(Unanswerable)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        self.match, self.unanswerable = match, unanswerable

    def __call__(
        self, completions: Sequence[Any], answers: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        if answers is None:
            present = f"the data has {sorted(columns) or 'no other'}"
            raise ValueError(f"the 'short_answer' reward needs a column 'answers', a list of texts, but {present}")
        require_column("short_answer", "answers", answers, completions, columns)
        return [self._score(completion, true) for completion, true in zip(completions, answers, strict=True)]

    def _score(self, completion: Any, answers: Any) -> float | None:
        if answers is not None and (isinstance(answers, str) or not isinstance(answers, Sequence)):
            raise ValueError(f"answers must be a list of texts for each completion, not {type(answers).__name__}")
        if not answers:
            return 0.0 if self.unanswerable == "wrong" else None
        prediction = normalised(short_answer(completion_text(completion)))
        true_answers = [text for text in (normalised(str(answer)) for answer in answers) if text]
        if self.match == "exact":
            return float(prediction in true_answers)
        return float(prediction != "" and any(prediction in text or text in prediction for text in true_answers))
