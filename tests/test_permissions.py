"""Files that we write have the permissions that the umask gives a new file. safetensors' own function would make them
readable by their owner alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparse_rl.data.synthetic import RunningSum
from sparse_rl.trace import EvictionTrace, save_traces
from trainer.batch import Example
from trainer.teacher import TeacherFacts, weights_fingerprint, write_teacher_cache


def modes(folder: Path) -> set[int]:
    """Return the permissions of all files in a folder."""
    return {file.stat().st_mode & 0o777 for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_written_files_follow_the_umask(umask, new_model, tmp_path):
    before = os.umask(umask)
    try:
        for name in ("traces", "model", "teacher", "plain"):
            (tmp_path / name).mkdir()
        save_traces(tmp_path / "traces/a.safetensors", [EvictionTrace.dense(2, 2, 9)])
        RunningSum.save_untrained(tmp_path / "model", 0)
        teacher = new_model("qwen2")
        facts = TeacherFacts("a teacher", weights_fingerprint(teacher), teacher.config.vocab_size, 1.0, 4, "float32")
        write_teacher_cache(tmp_path / "teacher", teacher, [Example([3, 4], [5, 6])], facts)
        save_file({"a": torch.zeros(1)}, tmp_path / "plain/a.safetensors")
    finally:
        assert os.umask(before) == umask  # reading the umask has not changed it
    assert [modes(tmp_path / name) for name in ("traces", "model", "teacher")] == 3 * [{0o666 & ~umask}]
    assert modes(tmp_path / "plain") == {0o600}  # control: the permissions that safetensors sets
