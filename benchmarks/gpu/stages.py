"""The stages of `python -m benchmarks.gpu`, the most important ones first, in case the time is short.

A stage is a generator function `stage(device, small, options)` that yields rows (dicts of JSON values) as soon as they
are measured. It runs in a process of its own (worker.py), and may raise anything.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

LIMIT = 8.0  # minutes; a call of ten minutes then has room for a stage and for the report
TRAINING = ("trl", "datasets", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Stage:
    """One measurement.

    name : name for `--only`, the results and the report
    question : the question that the stage answers, one line of the report
    function : "module:name" of the generator function
    needs : libraries without which the stage does not run, by their import names
    minutes : expected minutes on an H100; `--minutes` leaves out a stage that does not fit
    limit : minutes after which the stage is ended
    """

    name: str
    question: str
    function: str
    needs: tuple[str, ...] = ()
    minutes: float = 1.0
    limit: float = LIMIT

    def missing(self) -> list[str]:
        """Return the needed libraries that are not installed."""
        return [library for library in self.needs if not is_installed(library)]


def is_installed(library: str) -> bool:
    """Return True if a library can be imported. The library is not imported."""
    try:
        return importlib.util.find_spec(library) is not None
    except (ImportError, ValueError):
        return False


def _stage(name: str, question: str, place: str, needs: Sequence[str] = (), minutes: float = 1.0) -> Stage:
    return Stage(name, question, f"benchmarks.gpu.{place}", tuple(needs), minutes)


STAGES: tuple[Stage, ...] = (
    _stage(
        "attention_parity",
        "Are output, gradients and log-sum-exp of each attention kernel those of the dense float64 reference?",
        "attention:parity",
        minutes=2.5,
    ),
    _stage(
        "attention_speed",
        "How fast is attention under recorded evictions, and how many tiles does it visit?",
        "attention:speed",
        minutes=6.0,
    ),
    _stage("tests_kernels", "Do the tests of the kernels pass on this GPU?", "tests:kernels", ["pytest"], 5.0),
    _stage(
        "vllm_modes",
        "Does vLLM sample the same tokens in eager mode, with piecewise and with full CUDA graphs, and how fast?",
        "vllm:modes",
        ["vllm"],
        6.0,
    ),
    _stage("tests_vllm", "Do the tests of the vLLM engine pass on this GPU?", "tests:vllm", ["pytest", "vllm"], 7.0),
    _stage(
        "grpo_quickstart",
        "Does GRPO in bfloat16 run end to end, and what is the gap between sampler and trainer?",
        "training:grpo_quickstart",
        TRAINING,
        3.0,
    ),
    _stage(
        "compaction",
        "How long does a compaction of all layers of a 7B model take, and how many kernels does it launch?",
        "compaction:compaction",
        minutes=1.5,
    ),
    _stage(
        "decoding",
        "What share of decoding with a 7B model in the hf engine does compaction take?",
        "compaction:decoding",
        minutes=6.0,
    ),
    _stage(
        "vllm_1.5b",
        "How many tokens a second does vLLM decode with a 1.5B model, under a full and under a small cache?",
        "vllm:throughput_small_model",
        ["vllm"],
        7.0,
    ),
    _stage(
        "vllm_7b",
        "How many tokens a second does vLLM decode with a 7B model, under a full and under a small cache?",
        "vllm:throughput_large_model",
        ["vllm"],
        7.5,
    ),
    _stage(
        "vllm_equal_memory",
        "How many tokens a second does vLLM sample if all caches have the same number of blocks?",
        "vllm:equal_memory",
        ["vllm"],
        6.0,
    ),
    _stage(
        "training_steps",
        "How long do the forward and backward passes of distillation and of KVpop's retrofit take?",
        "training:steps",
        minutes=4.0,
    ),
    _stage(
        "grpo_1.5b",
        "How long does each part of a GRPO step with a 1.5B model take, and is its memory the predicted one?",
        "training:grpo_model",
        TRAINING,
        6.0,
    ),
    _stage("running_topk", "How fast is the running top-k in torch and in Triton?", "kernels:topk"),
    _stage("redundancy", "How fast is the redundancy of keys in torch and in Triton?", "kernels:redundancy"),
    _stage("sampler", "How fast is the sampler, and does it draw the reference's tokens?", "kernels:sampler"),
    _stage(
        "one_shot_compaction",
        "How long does each stage of the compaction of a long context take?",
        "contexts:one_shot",
        minutes=4.0,
    ),
)
