"""Whether a model that is named, and is no directory here, can be had: asked once, before anything heavy is imported.

huggingface_hub itself asks for each file, and again after 1, 2, 4, 8 and 8 seconds.
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
    """A hub model is neither in the cache nor to be had from the hub."""


def check_available(model: str) -> None:
    """Raise UnavailableError where `model` is neither here, nor in the hub's cache, nor to be had from the hub.

    Raise UserError where it can be no model's name.

    Where the hub cannot be reached, this process and those that it starts look into the cache only.
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
            f"{why}. Give the path of a local copy; or run `hf download {model}` where there is a network, and take "
            "that cache along with HF_HUB_OFFLINE=1",
            "model",
        )
    if not constants.HF_HUB_OFFLINE:
        logger.warning("%s: hub models come from the cache, as with HF_HUB_OFFLINE=1", why)
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


@cache
def _unreachable() -> str | None:
    """Why the hub is not asked; None where it answers, whatever it says."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=httpx.Timeout(CONNECT_SECONDS))
    except httpx.ReadTimeout:  # it is there, and slow
        return None
    except httpx.TransportError as error:
        return f"{constants.ENDPOINT} cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
    return None
