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
from sparse_rl.progress import rank, stage

if TYPE_CHECKING:
    from rich.table import Table

OURS = ("sparse_rl", "rollout", "trainer", "rewards")
STOPPED = "sparse-rl: stopped: "
ERROR_LOG = "error.log"
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


def check_launch() -> None:
    """Raise UserError unless RANK and WORLD_SIZE are those of a launcher: with a wrong rank, nothing is printed."""
    number, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (number.isdecimal() and world.isdecimal() and int(number) < int(world)):
        both = f"RANK is {show(number)} and WORLD_SIZE is {show(world)}"
        raise UserError(f"the environment variable {both}, which no launcher sets; unset both")


class Stderr(logging.Handler):
    """Handler that writes to the current sys.stderr, so log lines appear above the stages shown on a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


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

    If there is a reward, the gradient norm takes the loss's place, because GRPO's loss is 0 up to rounding on-policy.
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
    """Show the stages of a training run during this block. Yields a function to call with the trainer."""
    from transformers.trainer_callback import ProgressCallback, TrainerCallback

    rows = contextlib.ExitStack()

    class Shown(TrainerCallback):
        logged = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with rows.pop_all():  # the loading row closes once the next row is shown
                steps = stage("training", total=state.max_steps, unit="step", done=state.global_step)
                self.row = rows.enter_context(steps)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.row.advance()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            rows.close()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            line = training_line(state.global_step, state.max_steps, logs or {})
            if not state.is_world_process_zero or line is None:
                return
            if "train_runtime" in logs and not self.logged and logs.get("train_loss"):  # shorter than logging_steps
                line += f"  loss {logs['train_loss']:.4f}"
            self.logged = True
            print(line, flush=True)

    def show(trainer: Any) -> None:
        if trainer.pop_callback(ProgressCallback) is not None:
            trainer.add_callback(Shown())
        else:  # with disable_tqdm there is no such callback
            rows.close()

    with rows:
        rows.enter_context(stage("loading", model))
        yield show


# ---- errors --------------------------------------------------------------------------------------------------------


class Session:
    """State of one command.

    folder : directory for error.log; None until it is known
    interrupted : returns what an interrupted command has kept, and how to continue; None if it keeps nothing
    """

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.folder: Path | None = None
        self.interrupted: Callable[[], str] | None = None


def guarded(work: Callable[[], int], session: Session) -> int:
    """Run `work` and return the exit status. Print any exception as one line. A success deletes an older error log."""
    try:
        status = work()
        if status == 0 and session.folder is not None and rank() == 0:
            with contextlib.suppress(OSError):
                (session.folder / ERROR_LOG).unlink()
        return status
    except KeyboardInterrupt:
        return _interrupted(session)
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if session.folder is not None and rank() == 0:  # commands without a folder only print, and stay silent
            with contextlib.suppress(OSError):
                print(f"{STOPPED}the reader of the output has exited", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:  # including the SystemExit of a library or of user code
        return _interrupted(session) if _follows_an_interrupt(error) else _report(error, session)


def _interrupted(session: Session) -> int:
    if "RANK" not in os.environ:  # in a launch the launcher is interrupted too, and prints this once
        kept = "" if session.interrupted is None else f": {session.interrupted()}"
        print(f"sparse-rl: interrupted{kept}", file=sys.stderr)
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
        print(trace + line if session.verbose or (not expected and log is None) else line, file=sys.stderr)
    return status


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
