"""Training: GRPO end to end by the product's own command, and the passes of distillation and of KVpop's retrofit.

The passes need neither TRL nor an optimizer: they are the forward and backward passes that the trainers make.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.evictions import evictions
from benchmarks.gpu.shapes import config_of, dtype_name, dummy_model, random_prompts, sizes
from benchmarks.gpu.stages import is_installed
from benchmarks.gpu.timing import milliseconds
from benchmarks.gpu.worker import Options, Row, attempt
from sparse_rl.attention.config import TargetConfig
from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.interface import adopt
from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.models.directory import attach_scorers
from sparse_rl.policies import make_policy
from sparse_rl.trace import EvictionTrace
from trainer.batches import Batch
from trainer.examples import Example
from trainer.losses.config import DistillationLossConfig
from trainer.losses.distillation import DistillationLoss, TopK
from trainer.scored.loss import ScorerLoss

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart/model"
PARTS = ("sync", "generate", "rewards", "logprobs", "update", "step")
MODEL_CACHE = {"policy": "gkv", "budget": 128, "window": 16, "period": 32}  # that of qwen2.5-1.5b/grpo
TOP, REPETITIONS = 256, 3


# ---- GRPO -----------------------------------------------------------------------------------------------------------


def grpo_quickstart(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each engine: times of a step's parts, the gap, and the memory beside `doctor`'s prediction."""
    engines = ("hf", *(["vllm"] * is_installed("vllm")))
    yield from _grpo_rows(device, options, str(QUICKSTART), engines, sizes(small).grpo)


def grpo_model(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row as `grpo_quickstart` does, with dummy weights and one engine (vLLM if installed). Rewards are 0."""
    size = sizes(small)
    overrides = {**size.grpo, "cache": MODEL_CACHE, "gradient_checkpointing": True, **size.grpo_model}
    with tempfile.TemporaryDirectory() as folder:
        model = dummy_model(config_of(size.small_model), device, dtype_name(device))
        ends = json.loads((QUICKSTART / "config.json").read_text())
        for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
            setattr(model.config, key, ends.get(key))
            setattr(model.generation_config, key, ends.get(key))
        model.save_pretrained(folder)
        for file in QUICKSTART.glob("tokenizer*"):
            shutil.copy(file, folder)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
        # Only one engine: memory that a first training does not free would count in the peak of a second one.
        engines = ("vllm",) if is_installed("vllm") else ("hf",)
        yield from _grpo_rows(device, options, folder, engines, overrides)


def _grpo_rows(
    device: str, options: Options, model: str, engines: tuple[str, ...], overrides: dict[str, Any]
) -> Iterator[Row]:
    for engine in engines:
        if not options.measured(engine=engine):
            yield attempt({"engine": engine}, partial(_grpo, device, model, engine, overrides))


def _grpo(device: str, model: str, engine: str, overrides: dict[str, Any]) -> Row:
    from sparse_rl.commands.checks import prepare_training
    from sparse_rl.commands.memory import plan
    from sparse_rl.commands.train import run_training
    from sparse_rl.metrics import read_metrics
    from sparse_rl.recipe import TrainRecipe, load_recipe

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        keys = {"model": model, "output_dir": str(out), "dtype": "bfloat16", "rollout.engine": engine, **overrides}
        words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        prepared = prepare_training(load_recipe("quickstart/grpo", words).expect(TrainRecipe))
        predicted = plan(prepared)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run_training(prepared, lambda trainer: None)
        metrics = [line for line in read_metrics(out) if "time/step" in line]
        measured = metrics[1:] or metrics  # the first step compiles and warms up
        row: Row = {"model": f"{predicted.parameters:,} parameters", "steps": len(measured), "dtype": "bfloat16"}
        row |= {f"{part} s": statistics.median(line[f"time/{part}"] for line in measured) for part in PARTS}
        row["tokens/s"] = statistics.median(line["time/tokens_per_second"] for line in measured)
        row["gap mean"] = statistics.median(line["replay/gap_mean"] for line in metrics)
        row["gap max"] = max(line["replay/gap_max"] for line in metrics)
        row["predicted GB"] = (predicted.device if device == "cuda" else predicted.device + predicted.host) / 1e9
        row["peak GB"] = _peak(device)
        return {**row, "peak / predicted": row["peak GB"] / row["predicted GB"]} if device == "cuda" else row


def _peak(device: str) -> float:
    """Return the peak of allocated GPU memory; on a CPU, that of this process, its libraries included. In GB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


# ---- distillation and KVpop -----------------------------------------------------------------------------------------


def steps(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each training and attention kernel: seconds of the passes over one sequence, and the peak."""
    size = sizes(small)
    length = size.trained
    config = config_of(
        size.small_model, max_position_embeddings=max(length, size.small_model["max_position_embeddings"])
    )
    kernels = ("flex_sorted", "gather") if device == "cuda" else ("gather",)
    for name, made in (("distillation", _Distillation), ("KVpop", _Retrofit)):
        for kernel in kernels:
            keys = {"training": name, "kernel": kernel, "S": length}
            if not options.measured(**keys):
                yield attempt(keys, partial(_step, made, kernel, config, device, small, options))


def _step(made: Any, kernel: str, config: Any, device: str, small: bool, options: Options) -> Row:
    step = made(kernel, config, device, small, options)
    seconds: list[dict[str, float]] = []
    for repetition in range(REPETITIONS + 1):  # the first warms up and compiles
        if device == "cuda" and repetition == 1:
            torch.cuda.reset_peak_memory_stats()
        seconds.append({name: milliseconds(part, device) / 1e3 for name, part in step.parts().items()})
        step.student.zero_grad(set_to_none=True)
    totals = [sum(run.values()) for run in seconds[1:]]
    row: Row = {f"{name} s": statistics.median(run[name] for run in seconds[1:]) for name in seconds[0]}
    row |= {"all s": statistics.median(totals), "spread": (max(totals) - min(totals)) / statistics.median(totals)}
    return {**row, "loss": step.loss, "first s": sum(seconds[0].values()), "peak GB": _peak(device), **step.about}


class _Distillation:
    """A distillation step: the teacher's forward pass, and the student's passes under recorded evictions."""

    def __init__(self, kernel: str, config: Any, device: str, small: bool, options: Options) -> None:
        size = sizes(small)
        dtype = dtype_name(device)
        self.student, self.teacher = (adopt(dummy_model(config, device, dtype)) for _ in range(2))
        self.student.train()
        self.student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.teacher.requires_grad_(False)
        (tokens,) = random_prompts(1, size.trained)
        prompt = size.trained // 16
        layers, kv_heads, _ = cache_shape(config)
        evict_at, origin = evictions(device, small, options, size.trained)
        recorded = evict_at.repeat(-(-kv_heads // len(evict_at)), 1)[:kv_heads].expand(layers, -1, -1)
        example = Example(tokens[:prompt], tokens[prompt:], EvictionTrace.recorded(recorded.contiguous()))
        self.batch = Batch.make([example], torch.device(device), attention_kernel=kernel)
        self.head_loss = DistillationLoss(DistillationLossConfig(top_k=TOP))
        self.about: Row = {"dtype": dtype, "evictions": origin}
        self.loss = 0.0

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return the passes by name, which must run in this order."""
        return {"teacher": self._teach, "student forward": self._forward, "backward": self._backward}

    @torch.no_grad()
    def _teach(self) -> None:
        hidden = self.batch.hidden(self.teacher, replayed=False)
        self.known = TopK.of_hidden(hidden, self.teacher.get_output_embeddings(), TOP, 1.0, self.head_loss.config.chunk)

    def _forward(self) -> None:
        self._distil(self.batch.hidden(self.student, replayed=True))

    def _distil(self, hidden: torch.Tensor) -> None:
        head = self.student.get_output_embeddings()
        total, *_ = self.head_loss(hidden, head, self.known.__getitem__, self.batch.targets)
        self.total = total / len(self.batch.targets)

    def _backward(self) -> None:
        self.total.backward()
        self.loss = float(self.total.detach())


class _Retrofit(_Distillation):
    """A step of KVpop's retrofit: the scorers decide the student's evictions, and learn by the boundary loss."""

    def __init__(self, kernel: str, config: Any, device: str, small: bool, options: Options) -> None:
        super().__init__(kernel, config, device, small, options)
        self.kernel, budget = kernel, sizes(small).budget
        policy: Any = make_policy("kvpop", budget=budget, window=budget // 4, scorer={"name": "mlp"})
        attach_scorers(self.student, policy)
        self.student.cache_scorers.to(self.student.dtype)
        self.scorers = ScorerLoss(policy.config, TargetConfig(), BoundaryConfig())
        self.about = {"dtype": dtype_name(device), "evictions": f"decided by MLP scorers, budget {budget}"}

    def _forward(self) -> None:
        batch = self.batch
        view = self.scorers.view(self.student, *batch.sizes(), batch.ids.shape[1], kernel=self.kernel, measure=False)
        self._distil(batch.hidden_under(self.student, view))
        self.total = self.total + torch.stack(list(view.losses.values())).mean()
