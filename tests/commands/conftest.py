"""Fixtures of the command tests: an empty working directory, and a process that is restored after each test."""

import logging
import warnings

import pytest

from sparse_rl.commands import console
from sparse_rl.data.synthetic import RunningSum

RECIPE = """
kind: grpo
model: {model}
output_dir: {out}
dtype: float32
data: {{synthetic: {{task: running_sum, size: 64}}}}
rewards: [boxed]
cache: {{policy: streaming, budget: 16, period: 4}}
rollout: {{engine: hf}}
max_steps: 1
per_device_train_batch_size: 4
num_generations: 2
max_completion_length: 24
gradient_checkpointing: false
save_steps: 0
"""
EVAL = """
kind: eval
model: {model}
output_dir: {out}
dtype: float32
tasks: {{sums: {{synthetic: {{task: running_sum, size: 4, split: evaluation}}}}}}
accuracy: boxed
rollout: {{engine: hf}}
samples: 2
max_completion_length: 20
sweep: {{policy: [streaming, full], cache: {{budget: [16]}}}}
"""
SFT = """
kind: sft
model: {model}
output_dir: {out}
dtype: float32
data: {{synthetic: {{task: running_sum, size: 8}}}}
max_steps: 1
"""
BENCH = """
kind: bench
model: {model}
output_dir: out
dtype: float32
sweep:
  policy: [streaming, {{policy: gkv, window: 4}}, {{policy: gkv, window: 4, alpha: 0}}]
  cache: {{budget: [16], period: [4]}}
batch: [1, 5]
prompt_tokens: 10
length: [24, 40]
contexts: {{length: [30], compactions: [{{ratio: [0.2]}}, {{policy: evict, queries: [context], ratio: [0.2]}}]}}
repetitions: 2
rollout: {{engine: hf, progress: false}}
"""
TEXT = """
kind: perplexity
model: {model}
output_dir: out
dtype: float32
text: book.txt
prompt_tokens: 12
completion_tokens: 20
rollout: {{engine: hf, progress: false}}
"""
DISTILL = SFT.replace("kind: sft", "kind: distill\ncache: {{policy: streaming, budget: 16, period: 4}}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tiny untrained model."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    RunningSum.save_untrained(folder, 0)
    return folder


@pytest.fixture(autouse=True)
def restored_process(monkeypatch):
    """Undo the changes that a command makes to its process (environment, loggers, warnings) after each test."""
    loggers = {name: logging.getLogger(name) for name in ("", *console.OURS)}  # accelerate sets the root's level
    before = {name: (logger.level, list(logger.handlers)) for name, logger in loggers.items()}
    for key in (*console.QUIET, "TOKENIZERS_PARALLELISM", "DS_ACCELERATOR", "RANK", "WANDB_MODE"):
        monkeypatch.setenv(key, "")  # monkeypatch then restores the variable at the end
        monkeypatch.delenv(key)
    with warnings.catch_warnings():
        yield
    for name, (level, handlers) in before.items():
        loggers[name].setLevel(level)
        loggers[name].handlers[:] = handlers


@pytest.fixture
def workdir(tmp_path, model, monkeypatch):
    """A new working directory with a recipe of each of these kinds; their output_dir is out/."""
    monkeypatch.chdir(tmp_path)
    recipes = {"grpo": RECIPE, "eval": EVAL, "sft": SFT, "distill": DISTILL, "bench": BENCH, "text": TEXT}
    for name, text in recipes.items():
        (tmp_path / f"{name}.yaml").write_text(text.format(model=model, out=tmp_path / "out"))
    return tmp_path
