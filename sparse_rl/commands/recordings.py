"""The inputs of `sparse-rl plot --figure`: folders of rollouts, and files of traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import COMPLETIONS, ORIGIN, TRACES, Origin, read_origin
from sparse_rl.errors import UserError
from sparse_rl.models.directory import model_directory

if TYPE_CHECKING:
    from rollout.engine import Rollout
    from sparse_rl.trace import EvictionTrace


class Recording:
    """A folder that `sparse-rl rollout` wrote, or a file of traces. Everything is read when it is first used.

    path : the folder, a file in it, or a file of traces
    model_name : the model to load; None means the model that sampled the rollouts
    """

    def __init__(self, path: Path, model_name: str | None = None) -> None:
        whole = path.is_file() and not path.match(TRACES) and (path.parent / ORIGIN).is_file()
        self.path, self.model_name = path.parent if whole else path, model_name
        self._folder = self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def origin(self) -> Origin:
        return read_origin(self._folder)

    @cached_property
    def fingerprint(self) -> Mapping[str, str]:
        """Description of the sampler: name (`model`, `policy`, ...) -> text."""
        from sparse_rl.trace import read_fingerprint

        return self.origin.made_by if self.path.is_dir() else read_fingerprint(self.path)

    @property
    def named(self) -> Mapping[str, str]:
        """The fingerprint, with a short name of the model, for titles."""
        from sparse_rl.analysis.tables import model_label

        label = model_label(self.model_name or self.origin.model) if self.path.is_dir() else ""
        return {**self.fingerprint, "model": label} if label else self.fingerprint

    @cached_property
    def traces(self) -> Sequence[EvictionTrace]:
        return list(self.each_trace())

    def each_trace(self) -> Iterator[EvictionTrace]:
        """Yield all traces. Of a folder, only one file of traces is in memory at a time."""
        from sparse_rl.trace import load_traces

        yield from (r.trace for r in self.each()) if self.path.is_dir() else load_traces(self.path)

    @cached_property
    def rollouts(self) -> Sequence[Rollout]:
        return list(self.each())

    def each(self) -> Iterator[Rollout]:
        """Yield all rollouts in the order of their lines. Only one file of traces is in memory at a time."""
        from rollout.files import RolloutFiles
        from sparse_rl.attention.families import cache_shape, windows_of

        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file of traces without tokens; name the folder of {COMPLETIONS}")
        config = None if self.origin.has_traces else self.config
        shape = (0, 0) if config is None else cache_shape(config)[:2]
        files = RolloutFiles(self.path, self.origin)
        windows = () if config is None else windows_of(config)
        for part in files.parts(*shape, windows):
            yield from part.rollouts

    def rollout(self, line: int) -> Rollout:
        """Return the rollout on a line of completions.jsonl, counted from 1."""
        lines = 0
        for lines, rollout in enumerate(self.each(), start=1):
            if lines == line:
                return rollout
        raise UserError(f"{self.path / COMPLETIONS} has only {lines} lines", "--line")

    def longest(self) -> tuple[int, Rollout]:
        """Return the first of the longest rollouts, after its line of completions.jsonl, counted from 1."""
        return max(enumerate(self.each(), start=1), key=lambda numbered: len(numbered[1].trace))

    @cached_property
    def directory(self) -> str:
        name = self.model_name or self.origin.model
        if self.model_name is None and Path(name).is_absolute() and not Path(name).is_dir():
            raise UserError(f"{name}, the model that sampled {self.path}, does not exist; name the model", "--model")
        return model_directory(name)

    @cached_property
    def config(self) -> Any:
        from sparse_rl.models.load import load_config

        return load_config(self.directory)

    @cached_property
    def model(self) -> Any:
        """The model in evaluation mode, with our attention, in the dtype in which it sampled."""
        import torch

        from sparse_rl.models.load import load_model

        _ = self.config  # its check comes first
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return load_model(self.directory, self.origin.dtype).to(device).eval()

    @cached_property
    def tokenizer(self) -> Any:
        from sparse_rl.models.load import load_tokenizer

        return load_tokenizer(self.directory)

    def strings(self, ids: Sequence[int]) -> list[str]:
        return token_texts(self.tokenizer, ids)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token after the token before it. SentencePiece drops the space of a token that is decoded
    alone. Bytes of incomplete characters become replacement characters.
    """
    alone: list[str] = tokenizer.batch_decode([[token] for token in ids])
    pairs: list[str] = tokenizer.batch_decode([list(pair) for pair in pairwise(ids)])
    after = [pair.removeprefix(first) for first, pair in zip(alone, pairs, strict=False)]
    return [*alone[:1], *(a if a.strip() == text.strip() else text for a, text in zip(after, alone[1:], strict=False))]
