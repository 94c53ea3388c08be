"""The page docs/trl_options.md, made of one table: what each option of TRL's GRPOConfig is in a recipe of kind grpo.

python -m sparse_rl.recipe.trl_options > docs/trl_options.md
"""

from __future__ import annotations

from sparse_rl.recipe.keys import REQUIRED, all_keys
from sparse_rl.recipe.kinds import KINDS
from sparse_rl.recipe.passed_through import PASSED_THROUGH
from sparse_rl.recipe.refused import PREFIXES, REFUSED
from trainer import options

KIND = "grpo"

# Keys of ours with TRL's names; and TRL's default, where ours differs.
KEYS = (
    *("adam_beta1", "adam_beta2", "beta", "epsilon", "epsilon_high", "gradient_accumulation_steps"),
    *("gradient_checkpointing", "learning_rate", "logging_steps", "loss_type", "lr_scheduler_type"),
    *("max_completion_length", "max_grad_norm", "max_steps", "num_generations", "num_iterations", "num_train_epochs"),
    *("output_dir", "per_device_train_batch_size", "report_to", "run_name", "save_steps", "save_total_limit"),
    *("scale_rewards", "seed", "steps_per_generation", "temperature", "top_k", "top_p", "warmup_steps"),
    *("weight_decay",),
)
THEIRS: dict[str, object] = {
    "logging_steps": 10,
    "loss_type": "dapo",
    "lr_scheduler_type": "linear",
    "max_completion_length": 512,
    "num_train_epochs": 3.0,
    "output_dir": None,
    "report_to": "none",
    "save_steps": 500,
    "save_total_limit": None,
    "top_k": 0,
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
    if name in THEIRS:
        parts.append(f"default `{_shown(default_of_ours(name))}` (TRL: `{_shown(THEIRS[name])}`)")
    if name in OURS:
        words, link = OURS[name]
        parts.append(f"[{words}]({link})")
    return "ours: " + "; ".join(parts) if parts else "same"


def default_of_ours(name: str) -> object:
    """The default of a key of ours."""
    return next(REQUIRED if key.required else key.default for key in all_keys(KINDS[KIND]) if key.name == name)


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


if __name__ == "__main__":
    print(page(), end="")
