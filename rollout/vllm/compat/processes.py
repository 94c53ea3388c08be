"""Ends vLLM's processes when the process that started them ends, even if it is killed. Imports nothing large."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait
from typing import Any

OF_VLLM = ("EngineCore", "VllmWorker")  # prefixes of the names of vLLM's processes
WATCH = "end_with_parent"  # name of the watching thread
_run_engine_core: Any = None  # vLLM's own function, once our function has replaced it


def end_with_parent() -> None:
    """In a process of vLLM, start a thread that kills the process once its parent has ended: the engine of a killed
    parent would wait for requests forever. (Linux's PR_SET_PDEATHSIG comes when the starting thread ends: too early.)
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
    """Make an engine process watch its parent before its handshake with the server, which may take 5 minutes: only then
    does it load plugins.
    """
    global _run_engine_core
    from vllm.v1.engine.core import EngineCoreProc

    _run_engine_core = EngineCoreProc.run_engine_core
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Watch the parent, and run vLLM's own function. A spawned engine process imports this function by name."""
    from vllm.v1.engine.core import EngineCoreProc

    end_with_parent()
    (_run_engine_core or EngineCoreProc.run_engine_core)(*args, **kwargs)
