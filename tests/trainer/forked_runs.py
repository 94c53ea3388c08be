"""A process that imports all modules once and forks `sparse-rl` commands, so that each new run skips the imports.

    python forked_runs.py      reads one JSON line per command, {"words", "log", ...}, and answers with its exit status

If "record" names a file, the file operations in the run directory (open, rename, removal, ...) are written to it. A
command can also be made to fail: "kill_at" (the number of such an operation), "kill_after" (seconds), or "largest_file"
(bytes) from the step "full_after" on.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def watch_operations(folder: str, kill_at: int | None) -> list[str]:
    """Return a list that collects the file operations in a folder (CPython's audit events) as they happen.

    kill_at : number of the operation before which this process is killed
    """
    operations: list[str] = []

    def watch(event: str, arguments: tuple) -> None:
        if event.startswith(("open", "os.")) and folder in f"{arguments[:2]}":
            operations.append(f"{event} {arguments[:2]}")
            if len(operations) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return operations


def limit_files(job: dict[str, Any]) -> None:
    """Make writes beyond `largest_file` bytes fail once `full_after` steps are done, as on a full disk."""
    from transformers import TrainerCallback

    from trainer import rundir

    class Full(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == job["full_after"]:
                resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"], resource.RLIM_INFINITY))

    original = rundir.RunLog
    rundir.RunLog = type("RunLog", (Full, original), {})  # type: ignore[misc]


def child(job: dict[str, Any]) -> int:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if "kill_after" in job:
        threading.Timer(job["kill_after"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    folder = next(word for word in job["words"] if word.startswith("output_dir=")).removeprefix("output_dir=")
    operations = watch_operations(f"{folder}/", job.get("kill_at")) if "record" in job or "kill_at" in job else []
    if "full_after" in job:
        limit_files(job)
    from sparse_rl.cli import main

    status = main(job["words"])
    if "record" in job:
        Path(job["record"]).write_text(json.dumps(operations))
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def serve() -> None:
    for name in ("grpo.trainer", "sft", "distill", "retrofit"):
        importlib.import_module(f"trainer.{name}")
    importlib.import_module("sparse_rl.recipe.sampling")

    for line in sys.stdin:
        job, start = json.loads(line), time.perf_counter()
        if not (pid := os.fork()):
            status = 1
            try:
                status = child(job)
            finally:
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"status": code, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    serve()
