"""The processes that vLLM starts end with the one that started them, also where that one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

OF_VLLM = ("EngineCore", "VllmWorker")  # how their names begin


def end_with_parent() -> None:
    """Kill this process, if it is one of vLLM's own, once the one that started it is gone.

    A process that is killed can tell nobody: its engine would wait for requests for ever, with the model in memory. The
    kernel's own signal (PR_SET_PDEATHSIG) is sent when the thread ends that started the process, which is too early.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(OF_VLLM):
        return
    started_by = os.getppid()

    def watch() -> None:
        while os.getppid() == started_by and not wait([parent.sentinel], timeout=1):  # a fork may hold the sentinel
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end_with_parent").start()
