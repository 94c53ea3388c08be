"""A launched run reads, tokenises and hashes its data once per machine, as a run of one process does.

A sitecustomize module in each process records each text passed to a tokenizer and each checkpoint file that Python
opens (safetensors does not open files through Python, so only hashing is recorded).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import python

from sparse_rl.data.synthetic import RunningSum
from trainer.launch import FOLDER, launched, once, once_on_disk, remembered

WATCH = """
import json, os, sys
from transformers import PreTrainedTokenizerBase

def note(what, *given):
    line = json.dumps([os.getpid(), what, *given]) + "\\n"
    os.write(NOTES, line.encode())

NOTES = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
plain = PreTrainedTokenizerBase.__call__

def call(self, text=None, *args, **options):
    for one in [text] if isinstance(text, str) else text:
        note("text", one)
    return plain(self, text, *args, **options)

def watch(event, given):
    if event == "open" and str(given[0]).endswith("checkpoint-1/model.safetensors"):
        if "_partial" not in str(given[0]):
            note("hashed", str(given[0]))

PreTrainedTokenizerBase.__call__ = call
sys.addaudithook(watch)
"""
KINDS: dict[str, dict[str, Any]] = {
    "sft": {"lr_scheduler_type": "constant"},
    "distill": {
        "cache": {"policy": "gkv", "budget": 16, "window": 4, "period": 4},
        "rollout": {"engine": "hf"},
        "max_completion_length": 10,
    },
    "kvpop": {
        "cache": {"policy": "kvpop", "budget": 16, "window": 4},
        "packing": False,
        "max_length": 128,
        "boundary": {"queries": 8},
    },
}


@pytest.fixture
def counted_run(tiny, tmp_path):
    """counted_run(kind, processes, *words) runs `sparse-rl train` and returns (count of each tokenised text, number of
    hashed files, stderr)."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    dataset = RunningSum().rows("train", 16, 1, True)
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dataset))

    def run(kind: str, processes: int, *words: str, zero: int = 0) -> tuple[Counter, int, str]:
        recipe = {
            "kind": kind, "model": tiny("qwen3"), "output_dir": str(tmp_path / f"run{processes}"), "dtype": "float32",
            "data": {"path": str(tmp_path / "said.jsonl"), "max_prompt_tokens": 60}, "gradient_checkpointing": False,
            "per_device_train_batch_size": 4, "max_steps": 1, "save_steps": 1, "save_total_limit": None,
            "launch": {"processes": processes, "zero_stage": zero}, **KINDS[kind],
        }  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        notes = tmp_path / "notes.jsonl"
        notes.unlink(missing_ok=True)
        words = ("-m", "sparse_rl.cli", "train", "recipe.yaml", *words)
        process = python(*words, cwd=tmp_path, path=[tmp_path], NOTES=str(notes))
        assert process.returncode == 0, process.stderr[-3000:]
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
        test_text = "text"  # each process tokenises this text to test the tokenizer
        texts = Counter(values for _, event, values in lines if event == "text" and values != test_text)
        assert set(texts) >= {row["prompt"] for row in dataset}  # the control: tokenised texts are recorded
        return texts, sum(event == "hashed" for _, event, _ in lines), process.stderr

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "zero"), [("distill", 0), ("distill", 2), ("kvpop", 0), ("sft", 0), ("sft", 2)])
def test_two_processes_do_shared_work_once(kind, zero, counted_run):
    alone, hashed_alone, _ = counted_run(kind, 1, zero=zero)
    together, hashed_together, stderr = counted_run(kind, 2, zero=zero)
    assert together == alone
    assert hashed_alone == hashed_together == 0
    if kind == "distill":
        assert stderr.count("16 of 16 sequences are too long: 16 are truncated, 0 dropped") == 1
    resumed, hashed, _ = counted_run(kind, 2, "max_steps=2", "--resume", zero=zero)
    assert resumed == alone
    assert hashed == 1


def test_processes_share_results_through_the_launcher(monkeypatch):
    import datasets

    calls: list[str] = []

    def make(name: str) -> Callable[[], Any]:
        return lambda: calls.append(name) or {"made": name}

    def table(name: str) -> Callable[[], Any]:
        return lambda: calls.append(name) or datasets.Dataset.from_dict({"text": [name]})

    assert once("a", make("a")) == once("a", make("a"))  # no reuse outside the block
    assert calls == ["a", "a"]
    with remembered():
        folder = Path(os.environ[FOLDER])
        assert once("a", make("1")) == once("a", make("2")) == {"made": "1"}
        assert once_on_disk("b", table("3"))[:] == once_on_disk("b", table("4"))[:] == {"text": ["3"]}
        assert calls == ["a", "a", "1", "3"]
        monkeypatch.setenv("RANK", "1")
        assert launched()
        with remembered():
            first, second = once_on_disk("b", table("5")), once_on_disk("b", table("6"))
            assert calls == ["a", "a", "1", "3"]
            assert first._fingerprint == second._fingerprint
            assert [once("c", make("7")), once("c", make("8"))] == [{"made": "7"}, {"made": "8"}]
        assert folder.is_dir()
        monkeypatch.delenv("RANK")
    assert not folder.exists()
    assert FOLDER not in os.environ
