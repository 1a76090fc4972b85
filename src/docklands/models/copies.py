"""Copies between tiers of memory on a thread of their own, in the order that they were asked for.

Legend: none.

The computation goes on meanwhile. On an accelerator a copy first waits, on a stream of its own, for the work that the
device had been given until then, and for none that follows.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from docklands.errors import DocklandsError, TrainError

DEADLINE_S = 600.0
"""Of one copy: a disk or a bus that takes longer has failed."""
FAILURES = (DocklandsError, OSError, RuntimeError, ValueError, LookupError)
"""What a tier's copy may raise; torch's own are RuntimeError, memory that ran out among them."""

_Queue = SimpleQueue  # its put may run inside a garbage collection: copies are given up from __del__


class Copy:
    """One copy of a tensor's bytes. `data` is the tensor until a write is complete, and from then on None; of a read it
    stays, and is complete after `wait`.
    """

    def __init__(self, call: Callable[[int, Tensor], None], key: int, data: Tensor, release: bool) -> None:
        self.data: Tensor | None = data
        self._run, self._key, self._release = call, key, release
        self._after = _work_so_far(data.device)
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def run(self) -> None:
        """On the thread."""
        assert self.data is not None
        try:
            with self._after:
                self._run(self._key, flat(self.data))
        except FAILURES as error:  # raised where somebody waits for it
            self._error = error
        else:
            if self._release:
                self.data = None
        self._done.set()

    def wait(self) -> None:
        """Until it is complete. Raises what the copy raised; TrainError after DEADLINE_S."""
        if not self._done.wait(DEADLINE_S):
            raise TrainError(f"a copy between memory tiers took more than {DEADLINE_S:g} s", "is the disk slow?")
        if self._error is not None:
            raise self._error


class Copies:
    """The thread. It starts with the first copy and ends with this object.

    waited  how often the computation came to a copy that was not complete, and waited for it
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited = 0
        self._queue: _Queue[Any] = _Queue()
        self._started = False

    def write(self, call: Callable[[int, Tensor], None], key: int, data: Tensor) -> Copy:
        """call(key, bytes of data), later. The tensor must not change until then; it is let go of afterwards."""
        return self._add(Copy(call, key, data, release=True))

    def read(self, call: Callable[[int, Tensor], None], key: int, into: Tensor) -> Copy:
        """call(key, bytes of `into`), later."""
        return self._add(Copy(call, key, into, release=False))

    def drop(self, call: Callable[[int], None], key: int) -> None:
        """call(key) after all copies that were asked for before."""
        self._queue.put(lambda: call(key))

    def wait(self, copy: Copy) -> None:
        """See Copy.wait; counted."""
        self.waited += not copy.is_done
        copy.wait()

    def _add(self, copy: Copy) -> Copy:
        if not self._started:
            self._started = True
            threading.Thread(target=_serve, args=(self._queue,), name=self.name, daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        self._queue.put(copy.run)
        return copy


def _serve(queue: _Queue[Any]) -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # not until the next one comes


def flat(tensor: Tensor) -> Tensor:
    """Its bytes, uint8 [n]; of a tensor with gaps, those of a copy without."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _work_so_far(device: torch.device) -> Any:
    """A context in which an accelerator's current stream has waited for what this thread had asked of it until now."""
    if device.type == "cpu":
        return nullcontext()
    module: Any = getattr(torch, device.type)
    stream, event = module.Stream(device=device), module.Event()
    event.record(module.current_stream(device))
    stream.wait_event(event)
    return module.stream(stream)
