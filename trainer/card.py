"""The model card of a trained model: the README.md of its directory, which a hub shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sparse_rl.policies.base import Policy

LONG = 100_000  # tokens: of a sequence in which a policy shows whether less is read than is held
KINDS = {
    "grpo": "GRPO",
    "distill": "distillation",
    "kvpop": "KVpop's retrofit of a learned cache policy",
    "sft": "supervised fine-tuning",
}


def model_card(
    recipe: Mapping[str, Any], policy: Policy | None, versions: Mapping[str, str], *, steps: int, place: str | Path,
    hub_name: str | None = None,
) -> str:  # fmt: skip
    """Markdown, with the metadata that a hub reads in front.

    recipe : the resolved recipe; policy : what the directory carries; None: a full cache
    place : the directory; hub_name : its name on a hub, where it is pushed
    """
    base, kind = recipe["model"], recipe["kind"]
    reads_less = policy is not None and policy.most_read(1, LONG) < policy.schedule.most_decoding(1, LONG)
    about = ABOUT_FULL if policy is None else ABOUT_READ if reads_less else ABOUT_SMALL
    named = [] if policy is None else [policy.name]
    named = ["kv-cache-eviction", *named] if policy is not None and policy.schedule.evicts and not reads_less else named
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["sparse-rl", kind, *named],
    }
    if base.count("/") == 1 and not Path(base).exists():
        metadata["base_model"] = base
    table = {
        "Base model": f"`{base}`",
        "Training": f"{KINDS[kind]} (recipe of kind `{kind}`, below), {steps} steps",
        "Cache policy": "none: a full cache" if policy is None else f"`{policy!r}`",
    }
    if policy is not None and (peak := policy.schedule.peak) is not None:
        budget, held = policy.config.as_block()["budget"], policy.schedule.budget
        state = f", {budget - held} of them taken by the state of the scorers" if budget > held else ""
        table["Budget"] = f"{budget} entries per kv head{state}; at most {peak} are held while tokens are generated"
    table["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    rows = "\n".join(f"| {what} | {finding} |" for what, finding in table.items())
    local = str(place) if hub_name is None else hub_name.split("/")[-1]
    commands = [] if hub_name is None else [f"hf download {hub_name} --local-dir {local}"]
    only_hf = policy is not None and policy.config.only_hf
    commands += [] if only_hf else [f"sparse-rl serve {local}  # vLLM's OpenAI server"]
    commands += [f"sparse-rl eval eval/math500 model={local}  # accuracy"]
    return CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False).strip(),
        name=Path(place).resolve().parent.name if hub_name is None else local,
        about=about,
        table=rows,
        package="sparse-rl" if only_hf else "sparse-rl[vllm]",
        commands="\n".join(commands),
        local=local,
        carries="No cache policy comes with it" if policy is None else "The policy comes with it (`cache_policy.json`)",
        recipe=yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True).strip(),
    )


ABOUT_SMALL = """
It was trained to reason under a small KV cache. While it generates, entries of the cache are evicted by the policy
below; used with a full cache it is an ordinary model of its family."""
ABOUT_READ = """
It was trained to reason while each token reads a part of the KV cache, as the policy below says; used with a full cache
it is an ordinary model of its family."""
ABOUT_FULL = """
It was trained with a full KV cache."""
CARD = """---
{metadata}
---

# {name}

A model trained by sparse-rl (`pip install "{package}"`).
{about}

| | |
|---|---|
{table}

## Use

{carries}; each command takes it from there.

```bash
{commands}
```

In Python, under its cache:

```python
from rollout import SamplingConfig, make_engine
from sparse_rl.models.load import load_tokenizer

tokenizer = load_tokenizer("{local}")
engine = make_engine("hf", model="{local}")
prompt = tokenizer("What is 12 * 34?").input_ids
(rollout,) = engine.generate([prompt], SamplingConfig(max_tokens=1024))
print(tokenizer.decode(rollout.completion_ids))
```

With a full cache, in plain transformers:

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{local}")
```

## The recipe, every key written out

```yaml
{recipe}
```
"""
