"""Change the weights of a model's directory, and return how the changed model is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from judging import in_one_line
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_rl.models.directory import WEIGHTS
from sparse_rl.models.load import load_config, load_model
from sparse_rl.models.weights import check_weights

Change = Callable[[dict[str, Tensor]], object]


def refusal(folder: Path, change: Change) -> str | None:
    """Return the one-line error of a copy of the directory with changed weights. None means that it is accepted, and
    can be loaded.
    """
    copy = folder.with_name("changed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, copy / WEIGHTS, {"format": "pt"})
    result = in_one_line(lambda: check_weights(load_config(str(copy)), str(copy)))
    if isinstance(result, str):
        return result
    load_model(copy)
    return None
