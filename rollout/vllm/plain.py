"""Times vLLM without this project's plugin, in a process of its own, for comparison.

The process reads its arguments as JSON from its command line, and writes its results as JSON to its last line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from sparse_rl.errors import StoppedError


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
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise StoppedError(f"vLLM without the plugin failed: {lines[-1]}")
    return json.loads(process.stdout.splitlines()[-1])


def _path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def main() -> None:
    from rollout.timing.sampling import time_sampling
    from rollout.vllm.compat import arguments
    from rollout.vllm.observed import observed

    job = json.load(sys.stdin)
    arguments.prepare_environment()
    import vllm

    llm = vllm.LLM(
        job["model"], skip_tokenizer_init=True, disable_log_stats=True, use_tqdm_on_load=False, seed=0, **job["options"]
    )
    results = []
    for prompts in job["prompts"]:
        prompt, lengths = len(prompts[0]), job["lengths"]

        def sample(tokens: int, prompts: Any = prompts) -> None:
            parameters = vllm.SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)
            llm.generate([vllm.TokensPrompt(prompt_token_ids=ids) for ids in prompts], parameters, use_tqdm=False)

        sample(8)
        measured = time_sampling(
            partial(sample, max(lengths) - prompt), len(prompts), prompt, lengths, observed=observed(llm)
        )
        results.append([dataclasses.asdict(one) for one in measured])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
