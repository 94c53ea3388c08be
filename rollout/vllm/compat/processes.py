"""The processes that vLLM starts end with the one that started them, also where that one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait
from typing import Any

OF_VLLM = ("EngineCore", "VllmWorker")  # how their names begin
WATCH = "end_with_parent"  # the thread's name
_run_engine_core: Any = None  # vLLM's own, where ours stands in its place


def end_with_parent() -> None:
    """Kill this process, if it is one of vLLM's own, once the one that started it is gone.

    A process that is killed can tell nobody: its engine would wait for requests for ever, with the model in memory. The
    kernel's own signal (PR_SET_PDEATHSIG) is sent when the thread ends that started the process, which is too early.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(OF_VLLM):
        return
    if any(thread.name == WATCH for thread in threading.enumerate()):
        return
    started_by = os.getppid()

    def watch() -> None:
        while os.getppid() == started_by and not wait([parent.sentinel], timeout=1):  # a fork may hold the sentinel
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name=WATCH).start()


def watch_from_the_start() -> None:
    """Have the engine's process, started from this one, watch its parent before it does anything else.

    vLLM loads plugins there only once it has shaken hands with its server, for which it waits up to 5 minutes.
    """
    global _run_engine_core
    from vllm.v1.engine.core import EngineCoreProc

    _run_engine_core = EngineCoreProc.run_engine_core
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """What the engine's process runs: vLLM's own function, watched. Found by its name where the process is spawned."""
    from vllm.v1.engine.core import EngineCoreProc

    end_with_parent()
    (_run_engine_core or EngineCoreProc.run_engine_core)(*args, **kwargs)
