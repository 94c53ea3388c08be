"""What a command shows: quiet libraries, one line per training log, one line per error, and the exit status.

0 done; 1 the run failed; 2 the user can mend it; 130 interrupted. Tracebacks go to error.log in the run directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

from sparse_rl.errors import NotFiniteError, NotWrittenError, StoppedError, UserError

OURS = ("sparse_rl", "rollout", "trainer", "rewards")
STOPPED = "sparse-rl: stopped: "
QUIET = {
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "ACCELERATE_LOG_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "WANDB_SILENT": "true",
}


def rank() -> int:
    """This process's rank among those of one launch."""
    return int(os.environ.get("RANK", "0"))


# ---- quiet ---------------------------------------------------------------------------------------------------------


def configure(verbose: bool) -> None:
    """Our own log to stderr (on rank 0); the libraries' chatter off, unless `verbose`. Before they are imported."""
    logger = logging.getLogger("sparse_rl")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("sparse-rl: %(message)s"))
        for name in OURS:
            logging.getLogger(name).addHandler(handler)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.WARNING if rank() == 0 else logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not verbose:
        for key, value in QUIET.items():
            os.environ.setdefault(key, value)
        warnings.simplefilter("ignore")


def quiet_loading(verbose: bool) -> None:
    """transformers' bar for the loading of weights off; downloads keep theirs. Without a GPU DeepSpeed is told so."""
    import torch
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as hf_logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not verbose:
        hf_logging.disable_progress_bar()
        enable_progress_bars()


def say(what: str, finding: str) -> None:
    """One line about how this command goes about its work; of a launch the first process says it."""
    if rank() == 0:
        print(f"{what}: {finding}", flush=True)


def warn(warning: str) -> None:
    """One line about what is unwise; of a launch the first process says it."""
    if rank() == 0:
        print(f"sparse-rl: warning: {warning}", file=sys.stderr, flush=True)


# ---- training ------------------------------------------------------------------------------------------------------

FIRST_SIGN = 20.0  # seconds without a word, then twice as many, and so on
SHOWN = (  # metric, label, format
    ("reward", "reward", "{:.3f}"),
    ("accuracy_full", "accuracy", "{:.3f}"),
    ("grad_norm", "grad norm", "{:.2g}"),
    ("loss", "loss", "{:.4f}"),
    ("kl", "KL", "{:.4f}"),
    ("boundary_loss", "boundary", "{:.4f}"),
    ("recall", "recall", "{:.3f}"),
    ("mean_token_accuracy", "token accuracy", "{:.3f}"),
    ("replay/gap_max", "gap max", "{:.1e}"),
    ("cache/retention", "kept", "{:.0%}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("completions/clipped_ratio", "cut off", "{:.0%}"),
    ("time/tokens_per_second", "tok/s", "{:.0f}"),
)


def training_line(step: int, steps: int, logs: Mapping[str, Any]) -> str | None:
    """One log of a trainer as a line to read; None where it has nothing to show.

    Where there is a reward, the norm of the gradient stands for the loss: as advantages are centred within a group, the
    loss of GRPO is 0 up to rounding as long as the policy is the one that sampled, however much is learned.
    """
    if "train_runtime" in logs:
        return f"{step} steps in {logs['train_runtime']:.0f} s"
    held_out = any(key.startswith("eval_") for key in logs)
    hidden = "loss" if "reward" in logs or "eval_reward" in logs else "grad_norm"
    found = [
        f"{label} {'none' if logs[key] is None else form.format(float(logs[key]))}"  # None: no reward judged any
        for name, label, form in SHOWN
        if (key := f"eval_{name}" if held_out else name) in logs and name != hidden
    ]
    return f"step {step}/{steps}{'  held out' if held_out else ''}  " + "  ".join(found) if found else None


@contextlib.contextmanager
def signs_of_life(doing: Callable[[], str], heard: threading.Event) -> Iterator[None]:
    """Without a terminal, where no bar is shown: a line after 20 s, 60 s, 140 s, ... until a log is `heard`."""

    def speak() -> None:
        start, wait = time.monotonic(), FIRST_SIGN
        while not heard.wait(wait):
            print(f"{doing()}, {time.monotonic() - start:.0f} s after the start", flush=True)
            wait *= 2

    thread = threading.Thread(target=speak, daemon=True)
    if rank() == 0 and not sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        heard.set()
        if thread.ident is not None:
            thread.join()


@contextlib.contextmanager
def readable_progress() -> Iterator[None]:
    """transformers' default progress callback, replaced by one that writes `training_line` above its bar.

    Until the first such line there are `signs_of_life`.
    """
    import transformers.trainer as hf_trainer
    from tqdm import tqdm
    from transformers.trainer_callback import ProgressCallback

    at, heard = "loading", threading.Event()

    class Progress(ProgressCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal at
            at = f"in step {state.global_step + 1}/{state.max_steps}"

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                self.training_bar = tqdm(
                    total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True, disable=None
                )
            self.current_step = state.global_step

        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            pass  # the validation's batches are few

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            line = training_line(state.global_step, state.max_steps, logs or {})
            if state.is_world_process_zero and line:
                heard.set()
                tqdm.write(line)
                sys.stdout.flush()

    before = hf_trainer.DEFAULT_PROGRESS_CALLBACK
    hf_trainer.DEFAULT_PROGRESS_CALLBACK = Progress  # the one place where Trainer looks it up
    try:
        with signs_of_life(lambda: at, heard):
            yield
    finally:
        hf_trainer.DEFAULT_PROGRESS_CALLBACK = before


# ---- errors --------------------------------------------------------------------------------------------------------


class Session:
    """One command. `folder` is its run directory, once known, for error.log."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.folder: Path | None = None


def guarded(work: Callable[[], int], session: Session) -> int:
    """The exit status of `work`; whatever it raises becomes one line."""
    try:
        return work()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1
    except Exception as error:
        return _interrupted() if _follows_an_interrupt(error) else _report(error, session)


def _interrupted() -> int:
    if "RANK" not in os.environ:  # the launcher of several is interrupted too, and says so once
        print("sparse-rl: interrupted", file=sys.stderr)
    return 130


def _follows_an_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C came first: a library that is interrupted in C code may go on to raise an error of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _report(error: Exception, session: Session) -> int:
    """Say what has happened, once per launch; the exit status. The traceback goes to the log, or where there is none
    and nobody foresaw the error, to stderr.
    """
    status, line, foreseen = _describe(error)
    trace = "".join(traceback.format_exception(error))
    log = session.folder / "error.log" if session.folder is not None else None
    first = rank() == 0
    if log is not None:
        # Processes that cannot write give a reason each, of which one is enough; and may not be able to write here.
        unwritten = error.what if isinstance(error, NotWrittenError) else None
        try:
            first = _append(log, line, trace, line if unwritten is None else f"{STOPPED}{unwritten} ")
        except OSError:
            log, first = None, first or unwritten is not None
    if not foreseen and log is not None:
        line += f" (traceback in {log})"
    if first:
        if session.verbose or (not foreseen and log is None):
            print(trace, end="", file=sys.stderr)
        print(line, file=sys.stderr)
    return status


def _describe(error: Exception) -> tuple[int, str, bool]:
    """(exit status, the one line to show, whether it was foreseen and needs no traceback)"""
    text = " ".join(str(error).split())
    if isinstance(error, UserError | NotFiniteError):
        return 2, f"sparse-rl: error: {text}", True
    if isinstance(error, StoppedError):
        return 1, f"{STOPPED}{text}", True
    if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
        return 1, f"{STOPPED}the disk is full: {text}", True
    torch = sys.modules.get("torch")  # where it was never imported, its errors were not raised
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        mend = "`sparse-rl doctor RECIPE` says what takes how much; lower rollout.max_batch or the batch size"
        return 1, f"sparse-rl: out of GPU memory: {mend}", True
    return 1, f"sparse-rl: unexpected {type(error).__name__}: {text}", False


def _append(log: Path, line: str, trace: str, begins: str) -> bool:
    """Add an entry to the log; whether this process is the first of its launch to say what `begins` so."""
    launch = f"{os.getppid()}.{os.environ.get('MASTER_PORT', '')}" if "RANK" in os.environ else f"{os.getpid()}"
    entry = f"[launch {launch}] {line}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a+", encoding="utf-8", errors="backslashreplace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        first = "RANK" not in os.environ or f"[launch {launch}] {begins}" not in file.read()
        file.write(f"{entry}\n{trace}\n")
    return first
