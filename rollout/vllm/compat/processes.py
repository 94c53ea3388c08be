"""Ends vLLM's processes when the process that started them ends, even if it is killed. Imports nothing large."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

OF_VLLM = ("EngineCore", "VllmWorker")  # prefixes of the names of vLLM's processes


def end_with_parent() -> None:
    """In a process of vLLM, start a thread that kills the process once its parent has ended: the engine of a killed
    parent would wait for requests forever. (Linux's PR_SET_PDEATHSIG comes when the starting thread ends: too early.)
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(OF_VLLM):
        return
    started_by = os.getppid()

    def watch() -> None:
        while os.getppid() == started_by and not wait([parent.sentinel], timeout=1):  # a fork may hold the sentinel
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
