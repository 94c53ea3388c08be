"""The page docs/trl_options.md, made of one table: what each option of TRL's GRPOConfig is in a recipe of kind grpo.

python -m sparse_rl.recipe.trl_options > docs/trl_options.md
"""

from __future__ import annotations

from sparse_rl.recipe.passed_through import PASSED_THROUGH
from sparse_rl.recipe.refused import PREFIXES, REFUSED
from trainer import options

KIND = "grpo"

# Keys of ours with TRL's names: how the default differs, ours before TRL's, where it does.
KEYS: dict[str, tuple[object, object] | None] = {
    "adam_beta1": None,
    "adam_beta2": None,
    "beta": None,
    "epsilon": None,
    "epsilon_high": None,
    "gradient_accumulation_steps": None,
    "gradient_checkpointing": None,
    "learning_rate": None,
    "logging_steps": (1, 10),
    "loss_type": ("grpo", "dapo"),
    "lr_scheduler_type": ("constant", "linear"),
    "max_completion_length": (4096, 512),
    "max_grad_norm": None,
    "max_steps": None,
    "num_generations": None,
    "num_iterations": None,
    "num_train_epochs": (1.0, 3.0),
    "output_dir": ("required", None),
    "per_device_train_batch_size": None,
    "report_to": ([], "none"),
    "run_name": None,
    "save_steps": (100, 500),
    "save_total_limit": (2, None),
    "scale_rewards": None,
    "seed": None,
    "steps_per_generation": None,
    "temperature": None,
    "top_k": (None, 0),
    "top_p": None,
    "warmup_steps": None,
    "weight_decay": None,
}

# Options that are taken, and do more, less or something else than in TRL: how, and the page that says more.
OURS: dict[str, tuple[str, str]] = {
    "beta": ("the reference model replays the evictions too", "grpo.md#the-recipe"),
    "gradient_checkpointing": ("never reentrant: that cannot be replayed", "internals.md"),
    "gradient_checkpointing_kwargs": ("`use_reentrant: true` is refused", "internals.md"),
    "max_completion_length": ("an output that is cut off has advantage 0", "grpo.md#the-recipe"),
    "output_dir": ("also holds the run's record, metrics and final model", "resume.md"),
    "save_steps": ("0: no checkpoint", "resume.md"),
    "seed": ("also of what is sampled", "resume.md"),
    "router_aux_loss_coef": ("only 0: there is no such loss under evictions", "engines.md#limits-in-detail"),
    "log_completions": ("the advantages shown are those trained on", "grpo.md#the-recipe"),
    "off_policy_mask_threshold": ("compares log-probs before top-p and top-k", "grpo.md#the-recipe"),
    "shuffle_dataset": ("from the second epoch on another order", "grpo.md#the-recipe"),
    "sync_ref_model": ("the mixed reference is kept in checkpoints", "grpo.md#the-recipe"),
}

OPENING = """\
# TRL's options

What each option of TRL's `GRPOConfig` is in a recipe of kind `grpo`; and the names of TRL's scripts and older versions,
which are refused. Made by
`python -m sparse_rl.recipe.trl_options > docs/trl_options.md`; change the lists that it reads, not this page.

- *Same*: it does what TRL says. For the options of loss, advantages and reference model a test compares losses,
  gradients and metrics under a full cache with those of TRL's own trainer on the same completions
  (`tests/trainer/test_grpo_against_trl.py`).
- *Ours*: it is taken, and differs as the table says.
- *Refused*: the error says what is said here.

| option | here |
|---|---|"""


def page() -> str:
    """The page in Markdown."""
    rows = {name: _taken(name) for name in [*KEYS, *PASSED_THROUGH[KIND]]}
    refused = {**REFUSED, **options.REFUSED[KIND]}
    rows |= {name: f"refused: {mend}" for name, mend in refused.items()}
    rows |= {f"{prefix}…": f"refused: {mend}" for prefix, mend in {**PREFIXES, **options.PREFIXES}.items()}
    return "\n".join([OPENING, *(f"| `{name}` | {rows[name]} |" for name in sorted(rows)), ""])


def _taken(name: str) -> str:
    parts = []
    if (differs := KEYS.get(name)) is not None:
        parts.append(f"default `{_shown(differs[0])}` (TRL: `{_shown(differs[1])}`)")
    if name in OURS:
        words, link = OURS[name]
        parts.append(f"[{words}]({link})")
    return "ours: " + "; ".join(parts) if parts else "same"


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


if __name__ == "__main__":
    print(page(), end="")
