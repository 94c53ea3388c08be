"""A text that a server's prompts may begin with: compacted once by the hf engine, before the server starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from rollout.context import PromptCacheConfig
from rollout.context.files import save_context
from rollout.context.prompts import ContextPrompts
from rollout.make import make_engine
from sparse_rl.data.tokens import Prompt, prompt_ids, split_prompt, with_context
from sparse_rl.errors import UserError, unread
from sparse_rl.files import read_text
from sparse_rl.models.load import load_tokenizer
from sparse_rl.temporary import temporary_folder

BEHIND = ("\n\nWhat", " 0", "a")  # continuations of a text; the text has only the tokens that do not depend on them


def compact_text(model: str, file: str, config: PromptCacheConfig, dtype: str, window: int | None) -> str:
    """Compact the text of a file with the hf engine, and print the progress to stdout.

    The text is the beginning of the user's first message, or of the prompt if the model has no chat template.

    window : context length of the model in tokens; None if unknown

    Returns the path of the compacted context's file, which is in memory (memfd) until this process ends, also after
    exec.

    Raises UserError if the file is not a text, if the text is too long or too short, or if the file of head budgets was
    made for another model.
    """
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {unread(error)}", "--context") from error
    tokenizer = load_tokenizer(model)
    prompt: Prompt = [{"role": "user", "content": text}] if tokenizer.chat_template else text
    tokens, first, prompts = _tokens(prompt, text, tokenizer)
    if window is not None and len(tokens) >= window:
        raise UserError(
            f"{file} has {len(tokens)} tokens, but the model can read only {window}, answer included; shorten it",
            "--context",
        )
    engine: Any = make_engine("hf", model=model, policy="full", dtype=dtype, progress=True)
    print(f"context: {len(tokens)} tokens of {file}", flush=True)
    context = engine.compact(
        tokens, replace(config, first=config.first + first), prompts, on_stage=lambda stage: print(stage, flush=True)
    )
    seconds = ", ".join(f"{stage} {taken:.0f} s" for stage, taken in context.seconds.items())
    print(f"context: {context.entries} entries left of {len(tokens)} ({seconds})", flush=True)
    descriptor = os.memfd_create("context", 0)  # the flags 0 keep the file open across exec
    with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder, open(descriptor, "wb", closefd=False) as memory:
        file = str(Path(folder) / "context.safetensors")
        save_context(file, context)
        with open(file, "rb") as written:
            shutil.copyfileobj(written, memory)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _tokens(prompt: Prompt, text: str, tokenizer: Any) -> tuple[list[int], int, ContextPrompts]:
    """Split prompts that begin with the text.

    Returns the tokens with which all these prompts begin, the number of tokens among them that the chat template puts
    before the text, and the prompts about the text.
    """

    def whole(continuation: str, thinking: bool | None = None) -> list[int]:
        return prompt_ids(with_context(prompt, text, text, continuation), tokenizer, thinking)

    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*map(whole, BEHIND), strict=False))
    first, common = split_prompt(prompt, text, tokenizer).first, [tokens[0] for tokens in same]
    if len(common) <= first:
        raise UserError("the text is too short: each of its tokens depends on the words that follow it", "--context")
    follow = lambda continuation: whole(continuation, thinking=False)[len(common) :]  # noqa: E731
    return common, first, ContextPrompts.of(tokenizer, follow, not isinstance(prompt, str))
