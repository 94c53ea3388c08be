"""The memory plan of one process: items of bytes, their peak, and the verdict whether the plan fits a machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparse_rl.commands.machine import show
from trainer.config import LaunchConfig

TIGHT = 0.9  # share of the memory above which a fit is called tight


@dataclass(frozen=True)
class Item:
    """Bytes that one process holds on its device and in host memory.

    name, note : label and remark of the item in the memory table
    when : phase in which the bytes are held: always, update, sampling, or avoided (shown, but not counted)
    """

    name: str
    device: int = 0
    host: int = 0
    when: str = "always"
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """Memory plan of one process, for a model with `parameters` parameters."""

    parameters: int
    items: list[Item] = field(default_factory=list)

    @property
    def device(self) -> int:
        """Peak bytes on the device: permanent items plus the larger of sampling and update, which do not overlap."""
        by = {when: sum(item.device for item in self.items if item.when == when) for when in ("update", "sampling")}
        return sum(item.device for item in self.items if item.when == "always") + max(by.values())

    @property
    def host(self) -> int:
        """Bytes of host memory, over all items that are counted."""
        return sum(item.host for item in self.items if item.when != "avoided")


def verdict(need: float, have: float, where: str) -> str:
    """Return one line that says whether `need` bytes fit into the `have` bytes of the memory `where`."""
    word = "does not fit" if need > have else "tight" if need > TIGHT * have else "fits"
    return f"{where}: {word}, about {show(need)} of {show(have)}"


def verdicts(made: Plan, launch: LaunchConfig, device: int | None, host: int) -> list[str]:
    """Return a line that says whether a plan fits into device memory, and a line for host memory.

    Without a GPU (`device` None), only host memory counts, which all processes of a machine share.
    """
    local = launch.processes // launch.machines
    if device is None:
        return [
            verdict(
                local * (made.device + made.host), host, f"host memory ({local} process{'es' * (local > 1)}, no GPU)"
            )
        ]
    return [verdict(made.device, device, "GPU memory, per process"), verdict(local * made.host, host, "host memory")]
