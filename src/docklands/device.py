"""Which device this process computes on. Importing this module does not import torch."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from docklands.errors import ConfigError

DeviceType = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this process; `str(device)` is what torch takes."""

    type: DeviceType
    index: int = 0

    def __str__(self) -> str:
        return "cpu" if self.type == "cpu" else f"{self.type}:{self.index}"

    @property
    def is_accelerator(self) -> bool:
        return self.type != "cpu"


@cache
def available() -> tuple[DeviceType, ...]:
    """Device types that work in this process, best first; always ends with "cpu"."""
    import torch

    found: list[DeviceType] = []
    if torch.cuda.is_available():
        found.append("cuda")
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
        if torch.npu.is_available():  # type: ignore[attr-defined]
            found.append("npu")
    return (*found, "cpu")


def choose(wanted: str = "auto", index: int | None = None) -> Device:
    """The device for a configured name: "auto", "cpu", "cuda" or "npu".

    `index` defaults to LOCAL_RANK (0 without it). ConfigError when the wanted type is not usable here.
    """
    types = available()
    if wanted != "auto" and wanted not in types:
        raise ConfigError(f"device {wanted!r} is not available here", f"this process can use: {', '.join(types)}")
    kind: Any = types[0] if wanted == "auto" else wanted
    if kind == "cpu":
        return Device("cpu")
    return Device(kind, int(os.environ.get("LOCAL_RANK", "0")) if index is None else index)


def current() -> Device:
    """The device that this process should use when nothing was configured."""
    return choose("auto")


def _module(device: Device) -> Any:
    """torch.cuda or torch.npu."""
    import torch

    return getattr(torch, device.type)


def synchronize(device: Device | None = None) -> None:
    """Wait for all queued work; nothing to do on CPU."""
    device = device or current()
    if device.is_accelerator:
        _module(device).synchronize(device.index)


def memory_allocated(device: Device | None = None) -> int:
    """Bytes that tensors hold on the accelerator; on CPU, the resident memory of the process."""
    device = device or current()
    return int(_module(device).memory_allocated(device.index)) if device.is_accelerator else rss()


def memory_capacity(device: Device | None = None) -> int:
    """Bytes of the accelerator, or of the host."""
    device = device or current()
    if device.is_accelerator:
        return int(_module(device).get_device_properties(device.index).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def rss() -> int:
    """Resident memory of this process in bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource  # not Linux: the peak is the nearest figure that every Unix has

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if os.uname().sysname == "Darwin" else peak * 1024


def keep_freed_memory() -> bool:
    """Let the C allocator keep freed memory instead of returning it to the system; call once, at the start of a worker.

    Large tensors otherwise come from fresh pages each time: on CPU that cost 17 % of a training step of a 135M model
    (150,000 page faults). The process keeps its peak size from then on. False where the C library has no mallopt.
    """
    import ctypes

    trim_threshold, top_pad, mmap_max = -1, -2, -4  # M_* of glibc's malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 256 << 20))
    return all(mallopt(key, value) == 1 for key, value in settings)
