"""The teacher cache gives the same losses as a teacher in memory, even after an interrupted write or a
damaged shard."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollout import make_engine
from sparse_rl.errors import NotFiniteError, UserError
from trainer.batch import Example
from trainer.distill import DistillArguments, DistillTrainer
from trainer.teacher import (
    TeacherCache,
    TeacherFacts,
    weights_fingerprint,
    write_teacher_cache,
)

VOCAB, TOP = 2000, 256
TEMPERATURE = 0.7


@pytest.fixture
def teacher(new_model):
    return new_model("qwen2", seed=3, vocab_size=VOCAB, num_hidden_layers=3, hidden_size=64)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    sizes = [(3 + i % 5, 2 + 7 * i % 23) for i in range(14)]
    return [Example(*(torch.randint(VOCAB, (n,), generator=generator).tolist() for n in pair)) for pair in sizes]


def facts_of(teacher: Any, dtype: str = "float32") -> TeacherFacts:
    return TeacherFacts("a teacher", weights_fingerprint(teacher), VOCAB, TEMPERATURE, TOP, dtype)


def write(folder: Path, teacher: Any, rows: list[Example], dtype: str = "float32") -> int:
    return write_teacher_cache(folder, teacher, rows, facts_of(teacher, dtype), batch_size=3, rows_per_shard=4, chunk=5)


@pytest.fixture
def losses(new_model, teacher, rows, tmp_path):
    """losses(cache or None) returns the losses of the first steps, with the teacher cache or, for None, with the
    teacher in memory.
    """

    def run(cache: TeacherCache | None) -> list[float]:
        student = new_model("qwen3", vocab_size=VOCAB)
        engine = make_engine("hf", model=copy.deepcopy(student), policy={"policy": "tova", "budget": 8, "period": 3})
        args = DistillArguments(
            output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=4,
            logging_steps=1, per_device_train_batch_size=5, learning_rate=1e-2, save_strategy="no", seed=1,
            bf16=False, lr_scheduler_type="linear", temperature=TEMPERATURE, top_k=TOP,
        )  # fmt: skip
        taught_by = copy.deepcopy(teacher) if cache is None else cache
        trainer = DistillTrainer(student, args, rows, teacher=taught_by, engine=engine)
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    return run


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-6), ("bfloat16", 2e-3), ("float16", 6e-4)])
@pytest.mark.few(1)
def test_losses_equal_those_of_a_teacher_in_memory(dtype, within, teacher, rows, losses, tmp_path):
    """`within` is the allowed relative error; of 16 bits, the error is larger than 1e-7, as rounding requires."""
    write(tmp_path / "cache", teacher, rows, dtype)
    online, cached = losses(None), losses(TeacherCache(tmp_path / "cache"))
    error = max(abs(a - b) / a for a, b in zip(online, cached, strict=True))
    assert online[-1] < 0.99 * online[0]
    assert error <= within
    assert dtype == "float32" or error > 1e-7  # in 16 bits the error is that of rounding, and not 0


@pytest.mark.slow
def test_with_the_cache_the_teacher_is_not_run(teacher, rows, losses, tmp_path):
    write(tmp_path / "cache", teacher, rows)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    teacher.model.register_forward_hook(count)
    losses(TeacherCache(tmp_path / "cache"))
    assert forwards == 0
    losses(None)  # the control; the hook is copied with the teacher
    assert forwards > 0


def test_an_interrupted_write_of_the_cache_continues(teacher, rows, tmp_path, monkeypatch):
    from trainer import teacher as module

    assert write(tmp_path / "whole", teacher, rows) == 0
    original, calls = module._shard_tensors, []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(module, "_shard_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cache", teacher, rows)
    with pytest.raises(UserError, match="not finished"):
        TeacherCache(tmp_path / "cache")
    assert write(tmp_path / "cache", teacher, rows) == 2
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "cache" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
def test_a_damaged_shard_is_refused_by_name(how, teacher, rows, tmp_path):
    write(tmp_path, teacher, rows)
    file = tmp_path / "shard-00001.safetensors"
    content = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(content[:-10])
    elif how == "flipped":
        content[-20] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()

    def read() -> None:
        cache = TeacherCache(tmp_path)
        cache.read(rows, "cpu")

    with pytest.raises(UserError, match="shard-00001"):
        read()
    assert write(tmp_path, teacher, rows) == 3  # only this shard is written again
    read()


def test_a_teacher_with_nan_weights_writes_no_shard(teacher, rows, tmp_path):
    spoilt = copy.deepcopy(teacher)
    with torch.no_grad():
        spoilt.get_output_embeddings().weight[3, 1] = float("nan")
    with pytest.raises(NotFiniteError, match=r"^the log-probabilities of the teacher a teacher are not finite: its we"):
        write(tmp_path, spoilt, rows)
    assert not list(tmp_path.iterdir())
    assert write(tmp_path, teacher, rows) == 0


def test_a_cache_with_other_settings_is_refused(teacher, rows, tmp_path):
    write(tmp_path, teacher, rows)
    with pytest.raises(UserError, match=r"written with temperature 0.7, but the recipe needs 1.0"):
        TeacherCache(tmp_path, {"temperature": 1.0})
    with pytest.raises(UserError, match="another teacher cache: dtype float32 instead of bfloat16"):
        write(tmp_path, teacher, rows, "bfloat16")
    other = copy.deepcopy(teacher)
    other.lm_head.weight.data[0, 0] += 1
    with pytest.raises(UserError, match="another teacher cache: teacher"):
        write(tmp_path, other, rows)
    with pytest.raises(UserError, match="written with source a teacher, but the recipe needs another"):
        TeacherCache(tmp_path, {"source": "another"})
    cache = TeacherCache(tmp_path, {"temperature": 0.7, "top_k": TOP})
    assert rows[0] in cache
    assert Example(rows[0].prompt, rows[1].completion) not in cache
    for broken in ("{", json.dumps({"format_version": 2}), json.dumps({"format_version": 1})):
        (tmp_path / "teacher.json").write_text(broken)
        with pytest.raises(UserError, match=r"teacher.json cannot be read"):
            TeacherCache(tmp_path)
    with pytest.raises(UserError, match="holds no teacher cache"):
        TeacherCache(tmp_path / "nowhere")


def test_after_a_full_disk_the_next_run_continues(
    teacher: Any, rows: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def full(tensors: Any, file: Path) -> None:
        file.write_bytes(b"part")
        written.append(file)
        if len(written) > 1:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, file)

    monkeypatch.setattr("trainer.teacher.save_file", full)
    with pytest.raises(SafetensorError):
        write(tmp_path, teacher, rows)
    monkeypatch.undo()
    assert write(tmp_path, teacher, rows) == 1
    assert TeacherCache(tmp_path).places
