"""The reward `format` checks whether a completion has the required format, not whether the answer is right."""

from collections.abc import Sequence
from typing import Any

from rewards.text import BOX, completion_text, last_boxed

STYLES = ("boxed", "think")


class FormatReward:
    r"""Scores 1.0 if the completion has the required format, else 0.0.

    style : ``boxed`` requires that the answer part has exactly one ``\boxed{...}``, closed and not empty. The answer
        part is the text after the last ``</think>``, or the whole text if there is no ``</think>``. A ``<think>`` that
        is not closed scores 0.0. A ``</think>`` without ``<think>`` is allowed, because many chat templates write the
        opening tag into the prompt. ``think`` is TRL's `think_format_reward`: the text must start with ``<think>`` and
        contain the closing tag
    """

    __name__ = "format"

    def __init__(self, *, style: str = "boxed") -> None:
        if style not in STYLES:
            raise ValueError(f"style must be one of {', '.join(STYLES)}, not {style!r}")
        self.style = style

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        texts = [completion_text(completion) for completion in completions]
        if self.style == "boxed":
            return [float(one_final_box(text)) for text in texts]
        from trl.rewards import think_format_reward

        return list(think_format_reward([[{"role": "assistant", "content": text}] for text in texts]))


def one_final_box(text: str) -> bool:
    """Return True if the answer part of the text has exactly one box, closed and not empty."""
    _, _, answer = text.rpartition("</think>")
    one_box = sum(1 for _ in BOX.finditer(answer)) == 1
    return "<think>" not in answer and one_box and bool((last_boxed(answer) or "").strip())
