"""Memory tiers: training state leaves the device while another phase needs its memory, and comes back in time.

Legend: none.

On an accelerator the lower tier is pinned host memory. On a CPU the device is RAM and the lower tier a file, so that
the resident memory of the process really falls. What moves is the storage under the tensors: it is emptied in place
(untyped_storage().resize_(0)), so that parameters, views and optimizers that know the tensor keep it.
"""

from __future__ import annotations

import contextvars
import ctypes
import errno
import logging
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from docklands.errors import SyncError
from docklands.obs.spans import span

log = logging.getLogger(__name__)

Kind = Literal["weights", "gradients", "optimizer"]
HISTORY = 10_000
"""Ledger entries kept."""


class Ledger:
    """Bytes in each (tier, kind), now, at most, and over time. Safe across threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[tuple[str, str], int] = {}
        self._peaks: dict[str, int] = {}
        self.history: deque[tuple[float, str, str, int]] = deque(maxlen=HISTORY)

    def add(self, tier: str, kind: str, size: int) -> None:
        """`size` bytes more (or fewer) in a tier; kept with the time (monotonic seconds)."""
        with self._lock:
            now = self._bytes[tier, kind] = self._bytes.get((tier, kind), 0) + size
            self.history.append((time.monotonic(), tier, kind, now))
            self._peaks[tier] = max(self._peaks.get(tier, 0), self._of(tier))

    def _of(self, tier: str) -> int:
        return sum(size for (name, _), size in self._bytes.items() if name == tier)

    def of(self, tier: str, kind: str = "") -> int:
        """Bytes now in a tier, of one kind or of all."""
        with self._lock:
            return self._bytes.get((tier, kind), 0) if kind else self._of(tier)

    def peak(self, tier: str) -> int:
        """Most bytes that were ever in a tier at once."""
        with self._lock:
            return self._peaks.get(tier, 0)


class Lower(Protocol):
    """A lower tier: keeps the bytes of storages by key."""

    name: str

    def write(self, key: int, data: Tensor) -> None: ...
    def read(self, key: int, data: Tensor) -> None: ...
    def drop(self, key: int) -> None: ...
    def close(self) -> None: ...


class FileTier:
    """Storages in a file without a name, in `folder`. One in memory, such as /dev/shm, frees nothing: a warning
    says so. CPU tensors.
    """

    name = "disk"

    def __init__(self, folder: str | Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(prefix="docklands-tier-", dir=folder)
        if file_system(os.fstat(self._file.fileno()).st_dev) in ("tmpfs", "ramfs"):
            place = folder or tempfile.gettempdir()
            log.warning(
                "swapping to %s frees no memory: it is in memory itself; set TMPDIR to a folder on a disk", place
            )
        self._places: dict[int, tuple[int, int]] = {}
        self._free: list[tuple[int, int]] = []
        self._end = 0

    def write(self, key: int, data: Tensor) -> None:
        """uint8 [n]. SyncError when the disk is full."""
        place = self._place(key, len(data))
        self._all(os.pwrite, data, place)

    def read(self, key: int, data: Tensor) -> None:
        """Into uint8 [n], of the size that was written."""
        self._all(lambda fd, view, at: os.preadv(fd, [view], at), data, self._places[key][0])

    def _all(self, call: Any, data: Tensor, place: int) -> None:
        # Not data.numpy(): torch never again resizes a storage that numpy has seen.
        view, done = memoryview((ctypes.c_char * len(data)).from_address(data.data_ptr())), 0
        while done < len(view):
            try:
                moved = call(self._file.fileno(), view[done:], place + done)
            except OSError as error:
                hint = (
                    "free some of the disk of TMPDIR, or set TMPDIR to another" if error.errno == errno.ENOSPC else ""
                )
                raise SyncError(f"swapping memory to disk: {error.strerror}", hint) from error
            if moved == 0:
                raise SyncError("swapping memory back from disk: the file ended early", "was it cut by someone?")
            done += moved

    def _place(self, key: int, size: int) -> int:
        if key in self._places:
            return self._places[key][0]
        fitting = [place for place in self._free if place[1] == size]
        if fitting:
            self._free.remove(fitting[0])
            start = fitting[0][0]
        else:
            start, self._end = self._end, self._end + size
        self._places[key] = (start, size)
        return start

    def drop(self, key: int) -> None:
        """The place may be used again for as many bytes."""
        if key in self._places:
            self._free.append(self._places.pop(key))

    def close(self) -> None:
        self._file.close()


class PinnedTier:
    """Storages in pinned host memory, copied on a stream of their own. CUDA or NPU tensors."""

    name = "host"

    def __init__(self, device: str) -> None:
        self._module: Any = getattr(torch, torch.device(device).type)
        self._stream = self._module.Stream(device=device)
        self._buffers: dict[int, Tensor] = {}

    def write(self, key: int, data: Tensor) -> None:
        """uint8 [n]; returns when the copy is complete, so that the storage may be freed."""
        if key not in self._buffers or len(self._buffers[key]) != len(data):
            self._buffers[key] = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
        self._copy(self._buffers[key], data)

    def read(self, key: int, data: Tensor) -> None:
        self._copy(data, self._buffers[key])

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        event.synchronize()  # blocks this thread (the prefetch thread) only

    def drop(self, key: int) -> None:
        self._buffers.pop(key, None)

    def close(self) -> None:
        self._buffers.clear()


@dataclass(eq=False)
class _Part:
    """One storage, once, whichever tensors share it."""

    key: int
    kind: Kind
    name: str
    storage: torch.UntypedStorage
    size: int
    here: bool = True


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """uint8 view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[arg-type]


def is_resident(tensor: Tensor) -> bool:
    """Whether a tensor's bytes are on its device; reading one that is not is a fault of memory."""
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride())) + 1
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= last * tensor.element_size()


class MemoryTiers:
    """Swaps registered tensors between their device and the lower tier.

    device  of the tensors; folder: of the file that is the lower tier on CPU
    """

    def __init__(self, device: str = "cpu", folder: str | Path | None = None, lower: Lower | None = None) -> None:
        on_cpu, self._device = torch.device(device).type == "cpu", device
        self.lower: Lower = lower or (FileTier(folder) if on_cpu else PinnedTier(device))
        self.ledger = Ledger()
        self._parts: dict[Kind, list[_Part]] = {"weights": [], "gradients": [], "optimizer": []}
        self._by_name: dict[str, _Part] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._coming: dict[Kind, Future[None]] = {}
        self._keys = 0

    def register(self, kind: Kind, tensors: Mapping[str, Tensor]) -> None:
        """What `kind` is from now on, in place of what it was. Tensors that share a storage move once."""
        self._settle(kind)
        if not self.is_here(kind):
            self._all_up(kind)  # it would be lost with its place in the lower tier
        for part in self._parts[kind]:
            self.ledger.add("device" if part.here else self.lower.name, kind, -part.size)
            self.lower.drop(part.key)
            self._by_name.pop(f"{kind}/{part.name}", None)
        known = {p.storage.data_ptr(): p for k in self._parts if k != kind for p in self._parts[k] if p.here}
        self._parts[kind] = []
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in known:
                continue
            self._keys += 1
            part = _Part(self._keys, kind, name, storage, storage.nbytes())
            known[storage.data_ptr()] = part
            self._parts[kind].append(part)
            self._by_name[f"{kind}/{name}"] = part
            self.ledger.add("device", kind, part.size)

    def bytes(self, *kinds: Kind) -> int:
        """Of these kinds, wherever they are."""
        return sum(part.size for kind in kinds for part in self._parts[kind])

    def is_here(self, *kinds: Kind) -> bool:
        """Whether all of it is on the device."""
        return all(part.here for kind in kinds for part in self._parts[kind])

    def swap_out(self, *kinds: Kind) -> int:
        """Down; returns the bytes that the device got back."""
        freed = 0
        for kind in kinds:
            self._settle(kind)
            with span("memory/swap_out", kind=kind) as attributes:
                size = sum(self._down(part) for part in self._parts[kind] if part.here)
                give_back(self._device)
                attributes |= {"bytes": size, **self._levels()}
            freed += size
        return freed

    def swap_out_one(self, kind: Kind, name: str) -> int:
        """One tensor's storage, as resharding lets go of it; returns its bytes (0: it shares another's)."""
        part = self._by_name.get(f"{kind}/{name}")
        return self._down(part) if part is not None and part.here else 0

    def prefetch(self, *kinds: Kind) -> None:
        """Begin to bring these back on the prefetch thread; returns at once. `swap_in` waits for the rest."""
        for kind in kinds:
            if kind not in self._coming and not self.is_here(kind):
                context = contextvars.copy_context()
                self._coming[kind] = self._thread.submit(
                    lambda run=context.run, kind=kind: run(self._all_up, kind, True)
                )

    def swap_in(self, *kinds: Kind, timeout_s: float = 600.0) -> None:
        """Back on the device; waits for a prefetch that is under way, at most `timeout_s`. SyncError."""
        for kind in kinds:
            if kind in self._coming:
                with span("memory/wait", kind=kind):
                    self._settle(kind, timeout_s)
            if not self.is_here(kind):
                self._all_up(kind)

    def _all_up(self, kind: Kind, ahead: bool = False) -> None:
        with span("memory/prefetch" if ahead else "memory/swap_in", kind=kind) as attributes:
            size = sum(self._up(part) for part in self._parts[kind] if not part.here)
            attributes |= {"bytes": size, **self._levels()}

    def _settle(self, kind: Kind, timeout_s: float = 600.0) -> None:
        """Let a prefetch of this kind finish; its error is raised here."""
        coming = self._coming.get(kind)
        if coming is not None:
            try:
                coming.result(timeout_s)
            except TimeoutError as error:
                raise SyncError(
                    f"{kind}: not back on the device within {timeout_s:g} s", "is the disk slow?"
                ) from error
            del self._coming[kind]

    def _down(self, part: _Part) -> int:
        self.lower.write(part.key, bytes_of(part.storage))
        self.ledger.add(self.lower.name, part.kind, part.size)
        try:
            part.storage.resize_(0)
        except RuntimeError as error:
            raise SyncError(
                f"{part.kind} {part.name}: its storage cannot be freed: {error}", "clone it first"
            ) from error
        part.here = False
        self.ledger.add("device", part.kind, -part.size)
        return part.size

    def _up(self, part: _Part) -> int:
        part.storage.resize_(part.size)
        self.ledger.add("device", part.kind, part.size)
        self.lower.read(part.key, bytes_of(part.storage))
        part.here = True
        self.ledger.add(self.lower.name, part.kind, -part.size)
        return part.size

    def _levels(self) -> dict[str, int]:
        return {f"{tier}_bytes": self.ledger.of(tier) for tier in ("device", self.lower.name)}

    def close(self) -> None:
        """Bring everything back and give the lower tier up."""
        kinds: Iterable[Kind] = ("weights", "gradients", "optimizer")
        self.swap_in(*kinds)
        self._thread.shutdown()
        self.lower.close()


def file_system(device: int) -> str:
    """Type of the file system of a device number (st_dev), "" where Linux does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted), "")


def give_back(device: str = "cpu") -> None:
    """Return freed memory to the system: torch keeps an accelerator's blocks otherwise, glibc small ones."""
    kind = torch.device(device).type
    if kind != "cpu":
        getattr(torch, kind).empty_cache()
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:  # another C library, which has its own ways
            return
