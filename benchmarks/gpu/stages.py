"""The stages of `python -m benchmarks.gpu`, the most important ones first, their sizes, and how one runs.

A stage is a generator function of Options that yields rows (dicts of JSON values), the most important ones first. It
may raise anything. It runs in a process group of its own, which ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sparse_rl.models.hub import SHAPES
from sparse_rl.temporary import FOLDER

HOUSE = Path(__file__).parents[2]
Row = dict[str, Any]
FAILURE = "failure"  # key of a row whose measurement raised an exception
BENCH = ("matplotlib", "pandas")  # which sparse-rl bench imports
VLLM = ("vllm", *BENCH)
TRAINING = ("trl", "datasets", "accelerate", "deepspeed")
VERSIONS = ("torch", "triton", "transformers", "vllm", *TRAINING)  # that a report names
VLLM_FILES = ("tests/gpu/test_vllm_cuda.py", "tests/gpu/test_waits_cuda.py")
TESTS = {  # words of pytest's command line
    "kernels": ("-m", "first", "tests/gpu", *(f"--ignore={file}" for file in VLLM_FILES)),
    "vllm": ("-m", "first", *VLLM_FILES),
    "rest": ("-m", "not first", "tests/gpu"),
}
OUTCOME = re.compile(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?: \((.*)\))?")
REASON = re.compile(r"(?:FAILED|ERROR) (\S+::.+?) - (.*)")
MACHINE = {  # topic -> the command that finds it out
    "commit": "git describe --always --dirty",
    "gpu": "nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm --format=csv,noheader",
}
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Stage:
    """One measurement.

    place : module and name of the generator function, in this package, and the words that it gets besides Options
    minutes : expected minutes on an H100; `--minutes` leaves out a stage for which less than half of them are left
    needs : libraries without which the stage does not run, by their import names
    limit : minutes after which the stage is ended; a call of ten minutes then has room for it and for the report
    """

    name: str
    place: str
    minutes: float
    needs: tuple[str, ...] = ()
    limit: float = 8.0


# Nothing has run on a GPU yet. Assumed: 10 s for the start of a process, 10 s to compile FlexAttention's forward pass
# for a length and 25 s more for the backward pass, 20 s for a vLLM engine with a tiny model and its test.
STAGES = (
    Stage("attention_parity", "kernels parity", 2.5),  # are the kernels those of the dense float64 reference?
    Stage("attention_speed", "kernels speed", 6.0),  # under recorded evictions
    Stage("tests_kernels", "stages run_tests kernels", 5.5, ("pytest",)),  # those marked `first`
    Stage("vllm_modes", "models modes", 6.0, VLLM),  # piecewise and full CUDA graphs
    Stage("tests_vllm", "stages run_tests vllm", 6.0, ("pytest", "vllm")),  # those marked `first`: 16 engines
    Stage("grpo_quickstart", "models grpo_quickstart", 3.0, TRAINING),  # end to end; the gap in bfloat16
    Stage("compaction", "models compaction", 1.5),  # of all layers of a 7B model; kernel launches
    Stage("decoding", "models decoding", 6.0, BENCH),  # a 7B model in the hf engine; the share of compactions
    Stage("vllm_1.5b", "models throughput small_model", 7.0, VLLM),
    Stage("vllm_7b", "models throughput large_model", 7.5, VLLM),
    Stage("vllm_equal_memory", "models equal_memory", 6.0, VLLM),  # all caches have the same number of blocks
    Stage("training_steps", "models steps", 4.0),  # passes of a model over a long sequence
    Stage("grpo_1.5b", "models grpo_model", 6.0, TRAINING),  # parts of a step; memory beside `doctor`'s prediction
    Stage("running_topk", "kernels topk", 0.6),
    Stage("redundancy", "kernels redundancy", 0.6),
    Stage("sampler", "kernels sampling", 0.6),
    Stage("one_shot_compaction", "models one_shot", 4.0, BENCH),  # of a long context
    Stage("tests_rest", "stages run_tests rest", 20.0, ("pytest",), limit=25.0),  # 31 engines, many compilations
)

FEW = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32, "hidden_size": 128, "intermediate_size": 192}
TINY_MODEL = {**SHAPES["Qwen/Qwen2.5-1.5B-Instruct"], **FEW, "vocab_size": 512}  # no prompt has a larger token id
SIZES: dict[str, tuple[Any, Any]] = {  # name -> full size, small size
    "large_model": (SHAPES["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"], TINY_MODEL),
    "small_model": (SHAPES["Qwen/Qwen2.5-1.5B-Instruct"], TINY_MODEL),
    "heads": ((28, 4, 128), (4, 2, 32)),  # query heads, kv heads, head dim of attention that is timed alone
    "lengths": ((16384, 32768, 4096), (256, 384)),  # of attention
    "budget": (2048, 64),  # of its evictions
    "topk": ((16384, 64), (600, 2)),  # tokens, kv heads
    "redundancy": ((28, 4, 2176, 128), (2, 2, 96, 32)),  # rows, kv heads, entries, head dim
    "sampler": ((64, 151_936), (4, 2000)),  # rows, vocabulary
    "requests": ((8, 64, 1), (1, 2)),  # of compaction and decoding
    "cache": ({"budget": 512, "period": 128, "window": 16}, {"budget": 48, "period": 16, "window": 8}),
    "decoded": ((512, 129), (48, 48)),  # prompt tokens and generated tokens in the hf engine
    "served": ((64, 16, 256), (2, 4)),  # vLLM's batch sizes
    "lengths_served": ((4096, 16384), (128,)),
    "generated": (512, 48),  # tokens that vLLM generates for each sequence
    "trained": (16384, 384),  # tokens of a training step
    "context": (60_000, 400),  # tokens of the context that is compacted once
    "runs": (7, 2),  # repetitions of a timing
    "grpo": (  # overrides of the recipe
        {"max_steps": 4},
        {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 96},
    ),
    "grpo_model": (  # more for the model with dummy weights
        {"max_completion_length": 512, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 2},
    ),
}


@dataclass(frozen=True)
class Options:
    """Inputs of a stage. earlier : rows of this stage from earlier calls that were cut"""

    device: str
    small: bool
    earlier: Sequence[Row] = ()

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def sizes(self) -> Any:
        return SimpleNamespace(**{name: pair[self.small] for name, pair in SIZES.items()})

    def measured(self, **keys: Any) -> bool:
        """Return True if an earlier call has a row with these values."""
        return any(keys.items() <= row.items() for row in self.earlier)


def attempt(keys: Row, work: Callable[[], Row]) -> Row:
    """Return the row `keys` with the results of `work`. If `work` raises, return it with the failure in one line."""
    try:
        return {**keys, **work()}
    except Exception as error:  # the other rows of the stage are still wanted
        traceback.print_exc()
        return {**keys, FAILURE: in_a_line(error)}
    finally:
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def in_a_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 300 characters."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]


def work(place: str, options: Options, folder: str, rows: Connection) -> None:
    """Be the process of a stage. Send each row, and in the end the status and its reason."""
    os.setsid()
    if sys.platform == "linux":  # the kernel kills this process as soon as its parent has ended
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ[FOLDER] = folder  # the product's temporary files end with the stage, even if it is killed
    printed = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    module, name, *words = place.split()
    try:
        for row in getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(options, *words):
            rows.send(row)
        rows.send(("done", ""))
    except Exception as error:
        traceback.print_exc()
        rows.send(("failed", in_a_line(error)))
    sys.stderr.flush()
    os._exit(0)  # a library's thread or destructor must not turn a finished stage into a failure


def run_stage(place: str, options: Options, limit: float, on_row: Callable[[Row], None]) -> Row:
    """Run a stage for at most `limit` seconds, call `on_row` with each row, and return status, reason and log."""
    context, rows, measured = multiprocessing.get_context("spawn"), 0, len(options.earlier)
    end = time.monotonic() + limit
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder, "log")
        log.touch()
        process = context.Process(target=work, args=(place, options, folder, sender))
        process.start()
        sender.close()
        status, reason = "", f"reached its limit of {limit:.0f} s"
        try:
            while receiver.poll(max(0.0, end - time.monotonic())):
                row = receiver.recv()
                if isinstance(row, tuple):
                    status, reason = row
                    break
                rows += 1
                measured += FAILURE not in row
                on_row(row)
        except EOFError:
            process.join()
            status, code = "failed", process.exitcode or 0
            reason = f"ended with exit status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
        status = status or ("cut" if measured else "failed")
        if status == "done" and not measured:
            status, reason = "failed", "all its rows failed" if rows else "ended without a row"
        lines = (
            log.read_text(errors="replace").replace(f"{HOUSE}/", "").replace(f"{sys.prefix}/", "").splitlines()[-12:]
        )
    return {"status": status, "reason": reason, "log": lines if status in ("cut", "failed") else []}


# ---- the machine, and the tests of tests/gpu -------------------------------------------------------------------------


def describe(options: Options) -> Iterator[Row]:
    """Yield topics and findings: the machine, the versions of the code and of libraries."""
    row: Row = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "python": sys.version.partition(" ")[0]}
    for topic, command in MACHINE.items():
        run = subprocess.run(command, shell=True, cwd=HOUSE, capture_output=True, text=True, timeout=30)
        row[topic] = run.stdout.strip() or "unknown"
    yield row | {package.name: package.version for package in distributions() if package.name in VERSIONS}


def run_tests(options: Options, which: str) -> Iterator[Row]:
    """Yield a row for each test as it ends, and then the reasons of failures. Raises RuntimeError if all skip."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-rfE"]
    command += ["-o", "addopts=", *(f"--deselect={row['test']}" for row in options.earlier), *TESTS[which]]
    wide = {**os.environ, "COLUMNS": "500"}  # pytest cuts reasons at the width
    process = subprocess.Popen(command, cwd=HOUSE, env=wide, text=True, stdout=subprocess.PIPE)
    ran, reasons = len(options.earlier), dict[str, None]()
    for line in process.stdout:
        print(line, end="")
        if match := OUTCOME.match(line):
            test, outcome, reason = match.groups()
            ran += outcome != "SKIPPED"
            reasons |= {str(reason): None} if outcome == "SKIPPED" else {}
            yield {"test": test, "outcome": outcome.lower()}
        elif match := REASON.match(line):
            yield {"test": match[1], "reason": match[2]}
    if not ran:
        raise RuntimeError(
            f"all tests skip: {', '.join(reasons)}" if reasons else f"pytest ended with {process.wait()}"
        )
