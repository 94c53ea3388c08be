"""What a command shows: quiet libraries, one line per training log, one line per error, and the exit status.

0 done; 1 the run failed; 2 the user can mend it; 130 interrupted. Tracebacks go to error.log in the run directory.
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
PROCESS_NUMBERS = (  # that torch's launcher sets, and those that accelerate reads beside them
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
    """This process's rank among those of one launch."""
    return int(os.environ.get("RANK", "0"))


def check_launch() -> None:
    """Raise UserError where an environment variable by which launchers number processes holds no such number."""
    for name in PROCESS_NUMBERS:
        text = os.environ.get(name, "0")
        if not (text.isdecimal() and text.isascii() and len(text) < 10):
            raise UserError(f"the environment variable {name} is {show(text)}; a launcher sets it to a whole number")
    if not 0 <= (port := int(os.environ.get("MASTER_PORT", "0"))) <= 65535:
        raise UserError(f"the environment variable MASTER_PORT is {port}; ports end at 65535")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if rank() >= world:
        raise UserError(f"the environment variable RANK is {rank()}, and WORLD_SIZE {world}; unset it, or set both")


class Stderr(logging.StreamHandler):
    """Writes to what is stderr at that time: while stages are shown on a terminal, above them."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _: Any) -> None:
        """logging sets it once, when the handler is made."""


# ---- quiet ---------------------------------------------------------------------------------------------------------


def configure(verbose: bool) -> None:
    """Our own log to stderr (on rank 0); the libraries' chatter off, unless `verbose`. Before they are imported.

    A character that the terminal's encoding lacks is shown by its number, not an error.
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
    """transformers' bars, and those of downloads, off: stages are shown instead. Without a GPU DeepSpeed is told so."""
    with stage("loading", "the libraries"):
        import torch
        from transformers.utils import logging as hf_logging

        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if not verbose:
            hf_logging.disable_progress_bar()


def say(what: str, finding: str) -> None:
    """One line about how this command goes about its work; of a launch the first process says it."""
    if rank() == 0:
        print(f"{what}: {finding}", flush=True)


def warn(warning: str) -> None:
    """One line about what is unwise; of a launch the first process says it."""
    if rank() == 0:
        print(f"sparse-rl: warning: {warning}", file=sys.stderr, flush=True)


def print_table(table: Table, width: int = 200) -> None:
    """Print a table, in a pipe in so many columns."""
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
def training_shown(model: str) -> Iterator[Callable[[Any], None]]:
    """The stages of a training in this block: loading, and, of the trainer that what this yields is given, the steps.

    It replaces transformers' own progress callback by one that also writes each `training_line`.
    """
    from transformers.trainer_callback import ProgressCallback, TrainerCallback

    rows = contextlib.ExitStack()

    class Shown(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer, self.said = trainer, False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with rows.pop_all():  # until the next row is there
                steps = stage("training", total=state.max_steps, unit="step", done=state.global_step)
                self.row = rows.enter_context(steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if screen.drawn is not None:  # else nobody looks, and a loss that is read is waited for
                self.row.tell(now_at(self.trainer) or self.row.told)
            self.row.advance()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            rows.close()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            line = training_line(state.global_step, state.max_steps, logs or {})
            if not state.is_world_process_zero or line is None:
                return
            screen.heard()
            if "train_runtime" in logs and not self.said and logs.get("train_loss"):  # fewer steps than one log takes
                line += f"  loss {logs['train_loss']:.4f}"
            self.said = True
            print(line, flush=True)

    def show(trainer: Any) -> None:
        if trainer.pop_callback(ProgressCallback) is not None:
            trainer.add_callback(Shown(trainer))
        else:  # under disable_tqdm
            rows.close()

    with rows:
        rows.enter_context(stage("loading", model))
        yield show


def now_at(trainer: Any) -> str:
    """The reward of a trainer's last step or, where there is none, its mean loss since the last log."""
    if rewards := getattr(trainer, "_metrics", {}).get("train", {}).get("reward"):
        return f"reward {rewards[-1]:.3f}"
    steps = trainer.state.global_step - trainer._globalstep_last_logged
    return f"loss {trainer._tr_loss.item() / steps:.4f}" if steps > 0 else ""


# ---- errors --------------------------------------------------------------------------------------------------------


class Session:
    """One command. `folder` is its run directory, once known, for error.log."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self.folder: Path | None = None


def guarded(work: Callable[[], int], session: Session) -> int:
    """The exit status of `work`; whatever it raises becomes one line. A success deletes the log of earlier errors."""
    try:
        status = work()
        if status == 0 and session.folder is not None and rank() == 0:
            with contextlib.suppress(OSError):
                (session.folder / ERROR_LOG).unlink()
        return status
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if session.folder is not None and rank() == 0:  # a run ends; who only showed something has been read
            with contextlib.suppress(OSError):
                print(f"{STOPPED}nobody reads the output any more", file=sys.stderr, flush=True)
        return 1
    except BaseException as error:  # also what a library's or a user's sys.exit raises
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


def _report(error: BaseException, session: Session) -> int:
    """Say what has happened, once per launch; the exit status. The traceback goes to the log, or where there is none
    and nobody foresaw the error, to stderr.
    """
    status, line, foreseen = _describe(error)
    trace = "".join(traceback.format_exception(error))
    log = session.folder / ERROR_LOG if session.folder is not None else None
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
        _tell(trace + line if session.verbose or (not foreseen and log is None) else line)
    return status


def _tell(words: str) -> None:
    """Write them to stderr. On a terminal the first process of a launch draws over what another one writes: there the
    launcher writes them, once all have ended.
    """
    if rank() > 0 and sys.stderr.isatty():
        from trainer.once import leave_words

        if leave_words(words):
            return
    print(words, file=sys.stderr)


def _describe(error: BaseException) -> tuple[int, str, bool]:
    """(exit status, the one line to show, whether it was foreseen and needs no traceback)"""
    text = " ".join(str(error).split())
    if isinstance(error, UserError | NotFiniteError):
        return 2, f"sparse-rl: error: {text}", True
    if isinstance(error, StoppedError):
        return 1, f"{STOPPED}{text}", True
    if (lacking := without_room(error)) is not None:
        why = "a file may not grow any further (ulimit -f)" if lacking.errno == EFBIG else "the disk is full"
        return 1, f"{STOPPED}{why}: {' '.join(str(lacking).split())}", True
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
