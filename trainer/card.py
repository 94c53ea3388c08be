"""The model card of a trained model: the README.md in the model's directory, which the Hugging Face Hub displays."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sparse_rl.policies.base import Policy
from sparse_rl.source import how_to_install

LONG = 100_000  # sequence length in tokens at which the card compares the entries held with the entries read
KINDS = {
    "grpo": "GRPO",
    "distill": "distillation",
    "kvpop": "KVpop's retrofit of a learned cache policy",
    "sft": "supervised fine-tuning",
}

# The keys are tasks of synthetic training data; None stands for the user's own data.
EVALUATIONS = {None: "eval/math500 model={}", "running_sum": "quickstart/eval model={} cache=null"}
PROMPTS = {None: "What is 12 * 34?", "running_sum": "Qa1b4c0d2e0f3g3h3?", "retrieval": "known: ba=7 of du=2 asked: du?"}


def evaluation_of(task: str | None, model: str) -> str | None:
    """Return the arguments of `sparse-rl eval` for a model trained on `task`, or None if EVALUATIONS lacks the task."""
    return EVALUATIONS[task].format(model) if task in EVALUATIONS else None


def model_card(
    recipe: Mapping[str, Any], policy: Policy | None, versions: Mapping[str, str], *, steps: int, place: str | Path,
    chat: bool = True, served: bool = True, hub_name: str | None = None
) -> str:  # fmt: skip
    """Return the card as Markdown, preceded by the metadata that the Hub reads.

    recipe : the resolved recipe
    policy : cache policy that is saved with the model; None means a full cache
    place : directory of the model
    chat : True if the model has a chat template
    served : False if vLLM cannot sample from a model of this family
    hub_name : repository name on the Hub; None if the model is not pushed
    """
    base, kind = recipe["model"], recipe["kind"]
    about, tags = ABOUT_FULL, ["sparse-rl", kind]
    if policy is not None:
        reads_less = policy.most_read(1, LONG) < policy.schedule.most_decoding(1, LONG)
        about = ABOUT_READ if reads_less else ABOUT_SMALL
        tags += [*(["kv-cache-eviction"] if policy.schedule.evicts and not reads_less else []), policy.name]
    metadata = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    if base.count("/") == 1 and not Path(base).exists():
        metadata["base_model"] = base
    table = {
        "Base model": f"`{base}`",
        "Training": f"{KINDS[kind]} (recipe of kind `{kind}`, below), {steps} steps",
        "Cache policy": "none: a full cache" if policy is None else f"`{policy!r}`",
    }
    if policy is not None and (peak := policy.schedule.peak) is not None:
        budget, scored_budget = policy.config.as_block()["budget"], policy.schedule.budget
        state = f", {budget - scored_budget} of them used by the scorers' state" if budget > scored_budget else ""
        table["Budget"] = f"{budget} entries per kv head{state}; at most {peak} are held while tokens are generated"
    table["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    task = (recipe["data"].get("synthetic") or {}).get("task")
    directory = hub_name.split("/")[-1] if hub_name else "." if Path(place).is_absolute() else str(place)
    local = shlex.quote(directory)
    commands = [] if hub_name is None else [f"hf download {hub_name} --local-dir {local}"]
    only_hf = not served or (policy is not None and policy.config.only_hf is not None)
    commands += [] if only_hf else [f"sparse-rl serve {local}  # vLLM's OpenAI server"]
    evaluation = evaluation_of(task, local)
    commands += [f"sparse-rl eval {evaluation}  # accuracy"] if evaluation else []
    return CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False).strip(),
        name=Path(place).resolve().parent.name if hub_name is None else directory,
        about=about,
        table="\n".join(f"| {what} | {finding} |" for what, finding in table.items()),
        install=how_to_install("" if only_hf else "vllm"),
        commands="\n".join(commands),
        local=directory,
        here=" (run them in this directory)" if directory == "." else "",
        prompt=PROMPTS.get(task, PROMPTS[None]),
        chat="" if chat or only_hf else ABOUT_PROMPTS,
        carries="It has no cache policy" if policy is None else "It includes the cache policy (`cache_policy.json`)",
        recipe=yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True).strip(),
    )


ABOUT_SMALL = """
It was trained to reason under a small KV cache. While it generates, the policy below evicts cache entries. With a full
cache it is an ordinary model of its family."""
ABOUT_READ = """
It was trained to reason while each token reads only a part of the KV cache, chosen by the policy below. With a full
cache it is an ordinary model of its family."""
ABOUT_FULL = """
It was trained with a full KV cache."""
ABOUT_PROMPTS = """
The model has no chat template: a server answers `/v1/completions` only, and a chat request gets status 400."""
CARD = """---
{metadata}
---

# {name}

A model trained by sparse-rl ({install}).
{about}

| | |
|---|---|
{table}

## Use

The commands below load the directory of this model{here}. {carries}.{chat}

```bash
{commands}
```

In Python, under its cache:

```python
from rollout import SamplingConfig, make_engine
from sparse_rl.models.load import load_tokenizer

tokenizer = load_tokenizer("{local}")
engine = make_engine("hf", model="{local}")
prompt = tokenizer("{prompt}").input_ids
(rollout,) = engine.generate([prompt], SamplingConfig(max_tokens=1024))
print(tokenizer.decode(rollout.completion_ids))
```

With a full cache, in plain transformers:

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{local}")
```

## The recipe, every key written out

````yaml
{recipe}
````
"""
