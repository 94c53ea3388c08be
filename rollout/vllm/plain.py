"""Times vLLM without this project's plugin, in a process of its own, for comparison.

The process reads its arguments as JSON from its standard input. It prints its results as JSON, in a line that begins
with RESULTS.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from sparse_rl.errors import StoppedError, one_line

RESULTS = "results: "


def time_plain_vllm(
    model: str, prompts: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], **options: Any
) -> list[list[dict[str, Any]]]:
    """Return for each batch of prompts a `Measured` (rollout/timing/sampling.py), as a mapping, for each length.

    options : arguments of `vllm.LLM`

    Raises StoppedError if the process fails.
    """
    job = json.dumps({"model": model, "prompts": prompts, "lengths": lengths, "options": options})
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": _path()}
    command = [sys.executable, "-m", "rollout.vllm.plain"]
    process = subprocess.run(command, input=job, env=environment, capture_output=True, text=True)
    for line in process.stdout.splitlines():
        if line.startswith(RESULTS):
            return json.loads(line.removeprefix(RESULTS))
    lines = process.stderr.strip().splitlines()
    errors = [line for line in lines if "Error" in line] or lines or ["it printed no message"]
    raise StoppedError(f"vLLM without the plugin failed (status {process.returncode}): {one_line(errors[-1], 300)}")


def _path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def end_with_parent() -> None:
    """Start a thread that kills this process once its parent has ended, for example by a signal."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_parent()
    from rollout.timing.sampling import time_sampling
    from rollout.vllm.compat import arguments
    from rollout.vllm.observed import observed

    job = json.load(sys.stdin)
    arguments.prepare_environment()
    import vllm

    llm = vllm.LLM(
        job["model"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,
        **job["options"],
    )
    results = []
    for prompts in job["prompts"]:
        prompt, lengths = len(prompts[0]), job["lengths"]

        def sample(tokens: int, prompts: Any = prompts) -> None:
            parameters = vllm.SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)
            llm.generate([vllm.TokensPrompt(prompt_token_ids=ids) for ids in prompts], parameters, use_tqdm=False)

        sample(min(8, max(lengths) - prompt))
        measured = time_sampling(
            partial(sample, max(lengths) - prompt), len(prompts), prompt, lengths, observed=observed(llm)
        )
        results.append([dataclasses.asdict(one) for one in measured])
    print(RESULTS + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
