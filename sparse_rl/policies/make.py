"""Cache policies made from a description: a name and parameters, settings, or a file of the user's own.

A policy from a file (`cache: {policy: my_policy.py:Valued, budget: 64}`) has the file as part of its settings: they
record its SHA-256, and a file with another content is refused before it runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sparse_rl.errors import UserError, did_you_mean, reason, unread
from sparse_rl.files import check_readable
from sparse_rl.policies.base import Policy
from sparse_rl.policies.config import EvictingConfig, PolicyConfig


def make_policy(policy: str | Policy | PolicyConfig | Mapping[str, Any], /, **parameters: Any) -> Policy:
    """Make a cache policy from a description; a policy object is returned unchanged.

    policy : a name; or the settings; or a mapping {"policy": name, its parameters}, where no name means a full cache
    parameters : further parameters for a name or a mapping; they override the parameters in the mapping

    Raises UserError for an unknown policy or parameter, a missing budget, or a value that breaks a parameter's rule.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, PolicyConfig):
        block = policy if isinstance(policy, Mapping) else {"policy": policy}
        policy = PolicyConfig.from_block({"policy": "full", **block, **parameters})
    instance: Policy = policy.part("policy")(policy)
    return instance


def fingerprint(policy: Policy) -> str:
    """Return the policy as one canonical JSON line, for trace files and checkpoints."""
    return json.dumps(policy.config.as_block(), sort_keys=True)


FIXED_PARTS = (
    "cache_class",
    "view_class",
    "sections",
    "only_hf",
)  # parts of the settings that an own policy cannot change
ONLY_SCORES = ("bias", "further", "take_in", "before_attending", "masks", "bound_to")  # of the policy


def own_config(name: str, recorded: Any = None) -> type[PolicyConfig]:
    """Return the settings class of the policy that `FILE.py:CLASS` names; it has the further key `sha256`.

    Raises UserError if the file cannot be used, if its SHA-256 is not the recorded one, or if CLASS is no policy.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file).expanduser()
    try:
        check_readable(path)
        source = path.read_bytes()
    except OSError as error:
        where = "run the command in the folder that has the file"
        raise UserError(f"cannot read {file}: {unread(error)}; {where}") from None
    digest = hashlib.sha256(source).hexdigest()
    if recorded not in (None, digest):
        differ = f"its SHA-256 is {digest}, recorded is {recorded}"
        raise UserError(f"{file} is not the file that was used: {differ}", "sha256")
    return _load(name, str(path.resolve()), attribute, source, digest)


@cache
def _load(name: str, path: str, attribute: str, source: bytes, digest: str) -> type[PolicyConfig]:
    module = ModuleType(f"policy_{digest}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, path, "exec"), module.__dict__)
        policy = getattr(module, attribute, None)
        settings = typing.get_type_hints(policy).get("config", Any) if isinstance(policy, type) else Any
    except Exception as error:
        raise UserError(f"{name} cannot be loaded: {type(error).__name__} {reason(error)}") from error
    if not isinstance(policy, type) or not issubclass(policy, Policy):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Policy)]
        near = did_you_mean(attribute, [key for key in classes if key != "Policy"])
        raise UserError(f"{name} is not a cache policy: expected a subclass of sparse_rl.policies.Policy{near}")
    settings = EvictingConfig if settings is Any else settings
    if not isinstance(settings, type) or not issubclass(settings, EvictingConfig):
        raise UserError(f"{name}: its annotation `config` is not a subclass of EvictingConfig")
    if "__dataclass_fields__" not in vars(settings):
        raise UserError(f"{name}: {settings.__name__} lacks the decorator @dataclass(frozen=True, kw_only=True)")
    changed = [part for part in FIXED_PARTS if getattr(settings, part) is not getattr(EvictingConfig, part)]
    changed += [part for part in ONLY_SCORES if getattr(policy, part) is not getattr(Policy, part)]
    if changed:
        raise UserError(f"{name}: a policy from a file may only evict, it cannot define {', '.join(changed)}")
    if policy.score is Policy.score and policy.compact is Policy.compact:
        raise UserError(f"{name}: it has neither a method `score` nor a method `compact`")
    members = {"name": name, "policy_class": f"{module.__name__}:{attribute}", "__doc__": settings.__doc__}
    sha256 = ("sha256", str, dataclasses.field(default=digest))
    return dataclasses.make_dataclass(
        settings.__name__, [sha256], bases=(settings,), namespace=members, frozen=True, kw_only=True
    )
