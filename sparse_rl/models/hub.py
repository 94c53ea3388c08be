"""Check that a hub model is available, once and before any heavy import.

Without the check, huggingface_hub would send a request for each file, and retry after 1, 2, 4, 8 and 8 seconds.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

from sparse_rl.errors import UserError

logger = logging.getLogger("sparse_rl")
CONNECT_SECONDS = 1.5


class UnavailableError(UserError):
    """A hub model is not in the hub's cache and cannot be downloaded."""


def check_available(model: str) -> None:
    """Raise UnavailableError if `model` is neither local nor cached, and the hub is unreachable.

    Raises UserError for an invalid name. If the hub is unreachable but the model is cached, this process and its
    children use only the cache from now on.
    """
    if Path(model).exists():
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError as error:
        raise UserError(f"{model} is neither a model directory nor a hub name; name one", "model") from error
    if (why := _unreachable()) is None:
        return
    if not cached:
        raise UnavailableError(
            f"there is no directory {model}, the cache of hub models ({constants.HF_HUB_CACHE}) does not hold it, and "
            f"{why}. Give the path of a local copy; or run `hf download {model}` on a machine with network access, "
            "copy its cache here, and set HF_HUB_OFFLINE=1",
            "model",
        )
    if not constants.HF_HUB_OFFLINE:
        logger.warning("%s: hub models are loaded from the cache only, as with HF_HUB_OFFLINE=1", why)
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


@cache
def _unreachable() -> str | None:
    """Return the reason why the hub cannot be used. None means that the hub answered, with any status."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=httpx.Timeout(CONNECT_SECONDS))
    except httpx.ReadTimeout:  # the hub is reachable but slow
        return None
    except httpx.TransportError as error:
        return f"{constants.ENDPOINT} cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
    return None
