"""Output of a command: quiet libraries, one line per training log, one line per error, and the exit status.

Exit status: 0 success; 1 the run failed; 2 an error that the user can fix; 130 interrupted. Tracebacks are written to
error.log in the run directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from errno import EFBIG
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.config import show
from sparse_rl.errors import NotFiniteError, NotWrittenError, StoppedError, UserError, without_room
from sparse_rl.progress import screen, stage

if TYPE_CHECKING:
    from rich.table import Table

OURS = ("sparse_rl", "rollout", "trainer", "rewards")
STOPPED = "sparse-rl: stopped: "
ERROR_LOG = "error.log"
PROCESS_NUMBERS = (  # set by torch's launcher, or read by accelerate
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"),
    *("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK"),
    *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
QUIET = {
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "ACCELERATE_LOG_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "WANDB_SILENT": "true",
}


def rank() -> int:
    """Return the rank of this process within its launch."""
    return int(os.environ.get("RANK", "0"))


def check_launch() -> None:
    """Raise UserError if an environment variable of the launcher (ranks, process counts, port) has an invalid value."""
    for name in PROCESS_NUMBERS:
        text = os.environ.get(name, "0")
        if not (text.isdecimal() and text.isascii() and len(text) < 10):
            raise UserError(
                f"the environment variable {name} is {show(text)}, not a whole number as set by a launcher; unset it"
            )
    if not 0 <= (port := int(os.environ.get("MASTER_PORT", "0"))) <= 65535:
        raise UserError(f"the environment variable MASTER_PORT is {port}; the largest port is 65535")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if rank() >= world:
        raise UserError(
            f"the environment variable RANK is {rank()}, but WORLD_SIZE is {world}; unset RANK, or set both"
        )


class Stderr(logging.StreamHandler):
    """Handler that writes to the current sys.stderr, so log lines appear above the stages shown on a terminal."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _: Any) -> None:
        """Ignore the assignment that logging makes when it creates the handler."""


# ---- quiet ---------------------------------------------------------------------------------------------------------


def configure(verbose: bool) -> None:
    """Send the project's log to stderr and, unless `verbose`, silence the libraries, which must not be imported yet.

    Without `verbose`, ranks above 0 log only errors. Characters that the terminal cannot encode are printed as escapes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logger = logging.getLogger("sparse_rl")
    if not logger.handlers:
        handler = Stderr()
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
    """Import torch and transformers, without progress bars unless `verbose`. Without a GPU, DeepSpeed uses the CPU."""
    with stage("loading", "the libraries"):
        import torch
        from transformers.utils import logging as hf_logging

        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if not verbose:
            hf_logging.disable_progress_bar()


def say(what: str, finding: str) -> None:
    """Print one line about a decision of this command, on rank 0 only."""
    if rank() == 0:
        print(f"{what}: {finding}", flush=True)


def warn(warning: str) -> None:
    """Print one line about an unwise setting, on rank 0 only."""
    if rank() == 0:
        print(f"sparse-rl: warning: {warning}", file=sys.stderr, flush=True)


def print_table(table: Table, width: int = 200) -> None:
    """Print a table that is as wide as the terminal, or `width` columns wide in a pipe."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else width).print(table)


# ---- training ------------------------------------------------------------------------------------------------------

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
    """Return one log of a trainer as a line; None if the log has none of the metrics in SHOWN.

    If the log has a reward, the line shows the gradient norm in place of the loss. GRPO centres advantages within a
    group, so its loss is 0 up to rounding while trained and sampling policy are equal, even if the model learns.
    """
    if "train_runtime" in logs:
        return f"{step} steps in {logs['train_runtime']:.0f} s"
    held_out = any(key.startswith("eval_") for key in logs)
    hidden = "loss" if "reward" in logs or "eval_reward" in logs else "grad_norm"
    fields = [
        f"{label} {'none' if logs[key] is None else form.format(float(logs[key]))}"  # None: no completion got a score
        for name, label, form in SHOWN
        if (key := f"eval_{name}" if held_out else name) in logs and name != hidden
    ]
    return f"step {step}/{steps}{'  held out' if held_out else ''}  " + "  ".join(fields) if fields else None


@contextlib.contextmanager
def training_shown(model: str) -> Iterator[Callable[[Any], None]]:
    """Show the stages of a training run during this block: loading, then the steps of a trainer.

    Yields a function to call with the trainer. The function replaces the progress callback of transformers by a
    callback that also prints each `training_line`.
    """
    from transformers.trainer_callback import ProgressCallback, TrainerCallback

    rows = contextlib.ExitStack()

    class Shown(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer, self.said = trainer, False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with rows.pop_all():  # the loading row closes once the next row is shown
                steps = stage("training", total=state.max_steps, unit="step", done=state.global_step)
                self.row = rows.enter_context(steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if screen.drawn is not None:  # only if rows are shown: reading the loss waits for the GPU
                self.row.tell(now_at(self.trainer) or self.row.told)
            self.row.advance()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            rows.close()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            line = training_line(state.global_step, state.max_steps, logs or {})
            if not state.is_world_process_zero or line is None:
                return
            screen.heard()
            if (
                "train_runtime" in logs and not self.said and logs.get("train_loss")
            ):  # the run was shorter than logging_steps
                line += f"  loss {logs['train_loss']:.4f}"
            self.said = True
            print(line, flush=True)

    def show(trainer: Any) -> None:
        if trainer.pop_callback(ProgressCallback) is not None:
            trainer.add_callback(Shown(trainer))
        else:  # with disable_tqdm there is no such callback
            rows.close()

    with rows:
        rows.enter_context(stage("loading", model))
        yield show


def now_at(trainer: Any) -> str:
    """Return a text with the reward of a trainer's last step or, without a reward, the mean loss since the last log."""
    if rewards := getattr(trainer, "_metrics", {}).get("train", {}).get("reward"):
        return f"reward {rewards[-1]:.3f}"
    steps = trainer.state.global_step - trainer._globalstep_last_logged
    return f"loss {trainer._tr_loss.item() / steps:.4f}" if steps > 0 else ""


# ---- errors --------------------------------------------------------------------------------------------------------


class Session:
    """State of one command. `folder` is the directory for error.log; None until it is known."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.folder: Path | None = None


def guarded(work: Callable[[], int], session: Session) -> int:
    """Run `work` and return the exit status. Print any exception as one line. A success deletes an older error log."""
    try:
        status = work()
        if status == 0 and session.folder is not None and rank() == 0:
            with contextlib.suppress(OSError):
                (session.folder / ERROR_LOG).unlink()
        return status
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if session.folder is not None and rank() == 0:  # commands without a folder only print, and stay silent
            with contextlib.suppress(OSError):
                print(f"{STOPPED}the reader of the output has exited", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:  # including the SystemExit of a library or of user code
        return _interrupted() if _follows_an_interrupt(error) else _report(error, session)


def _interrupted() -> int:
    if "RANK" not in os.environ:  # in a launch the launcher is interrupted too, and prints this once
        print("sparse-rl: interrupted", file=sys.stderr)
    return 130


def _follows_an_interrupt(error: BaseException | None) -> bool:
    """True if Ctrl-C caused the error: a library that is interrupted in C code may then raise an error of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _report(error: BaseException, session: Session) -> int:
    """Report an error once per launch, and return the exit status.

    The traceback is written to the error log or, if there is no log and the error was unexpected, to stderr.
    """
    status, line, expected = _describe(error)
    trace = "".join(traceback.format_exception(error))
    log = session.folder / ERROR_LOG if session.folder is not None else None
    first = rank() == 0
    if log is not None:
        # Each process that cannot write has its own reason, but only one is printed. The log may be unwritable too.
        unwritten = error.what if isinstance(error, NotWrittenError) else None
        try:
            first = _append(log, line, trace, line if unwritten is None else f"{STOPPED}{unwritten} ")
        except OSError:
            log, first = None, first or unwritten is not None
    if not expected and log is not None:
        line += f" (traceback in {log})"
    if first:
        _tell(trace + line if session.verbose or (not expected and log is None) else line)
    return status


def _tell(words: str) -> None:
    """Write a message to stderr.

    On a terminal, rank 0 would draw over messages of other ranks, so the launcher prints those after all processes end.
    """
    if rank() > 0 and sys.stderr.isatty():
        from trainer.once import leave_words

        if leave_words(words):
            return
    print(words, file=sys.stderr)


def _describe(error: BaseException) -> tuple[int, str, bool]:
    """Return (exit status, line to print, True if the error was expected and needs no traceback)."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError | NotFiniteError):
        return 2, f"sparse-rl: error: {text}", True
    if isinstance(error, StoppedError):
        return 1, f"{STOPPED}{text}", True
    if (lacking := without_room(error)) is not None:
        why = "a file has reached its size limit (ulimit -f)" if lacking.errno == EFBIG else "the disk is full"
        return 1, f"{STOPPED}{why}: {' '.join(str(lacking).split())}", True
    torch = sys.modules.get("torch")  # not imported means that it raised nothing
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        mend = "`sparse-rl doctor RECIPE` lists the memory of each part; lower rollout.max_batch or the batch size"
        return 1, f"sparse-rl: out of GPU memory: {mend}", True
    return 1, f"sparse-rl: unexpected {type(error).__name__}: {text}", False


def _append(log: Path, line: str, trace: str, begins: str) -> bool:
    """Append an entry to the log. Returns True if this launch has not yet logged a line that starts with `begins`."""
    launch = f"{os.getppid()}.{os.environ.get('MASTER_PORT', '')}" if "RANK" in os.environ else f"{os.getpid()}"
    entry = f"[launch {launch}] {line}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a+", encoding="utf-8", errors="backslashreplace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        first = "RANK" not in os.environ or f"[launch {launch}] {begins}" not in file.read()
        file.write(f"{entry}\n{trace}\n")
    return first
