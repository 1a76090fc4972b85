"""Weight sync when trainer and generators live in one process: a stream of named tensors, then a check of versions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from docklands.errors import VersionMismatch

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource(Protocol):
    """The trainer's side."""

    def weights(self) -> Iterable[tuple[str, Tensor]]: ...


class WeightSink(Protocol):
    """The generator's side."""

    @property
    def version(self) -> int: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...


Call = Callable[..., Awaitable[object]]


class InProcessSync:
    """publish(version): every generator holds the trainer's weights, and says so.

    call  runs a function on the device's thread under its lease
    """

    def __init__(self, source: WeightSource, sinks: list[WeightSink], call: Call) -> None:
        self._source = source
        self._sinks = sinks
        self._call = call

    async def publish(self, version: int) -> None:
        """Raises MissingWeight or ShapeMismatch (from the generator), VersionMismatch."""
        await self._call("publish", self._copy, version)

    def _copy(self, version: int) -> None:
        for sink in self._sinks:
            sink.load_weights(self._source.weights(), version)
        stale = [(i, sink.version) for i, sink in enumerate(self._sinks) if sink.version != version]
        if stale:
            raise VersionMismatch(f"after publishing version {version}, generators hold (index, version): {stale}")
