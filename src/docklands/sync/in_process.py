"""Weight sync when trainer and generators live in one process: a stream of named tensors, then a check of versions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from docklands.errors import VersionMismatch

if TYPE_CHECKING:
    from torch import Tensor

Named = Iterable[tuple[str, "Tensor"]]


class WeightSource(Protocol):
    """The trainer's side: weights, adapters merged into them; the same apart; adapters alone."""

    def weights(self) -> Named: ...

    def parts(self) -> Named: ...

    def adapters(self) -> Named: ...


class WeightSink(Protocol):
    """The generator's side. load_adapters: of one that has their base already."""

    @property
    def version(self) -> int: ...

    def load_weights(self, weights: Named, version: int) -> None: ...

    def load_adapters(self, weights: Named, version: int) -> None: ...


Call = Callable[..., Awaitable[object]]
Note = Callable[[Mapping[str, tuple[float, float]]], None]


class InProcessSync:
    """publish(version): every generator holds the trainer's weights, and says so.

    call      runs a function on the device's thread under its lease
    adapters  generators have the trainer's adapters: the first publish brings them their base too, later ones the
              adapters alone
    note      told of the bytes that generators were given; None: nobody asks
    """

    def __init__(
        self,
        source: WeightSource,
        sinks: list[WeightSink],
        call: Call,
        adapters: bool = False,
        note: Note | None = None,
    ) -> None:
        self._source, self._sinks, self._call = source, sinks, call
        self._adapters, self._note = adapters, note
        self._based = False

    async def publish(self, version: int) -> None:
        """Raises MissingWeight or ShapeMismatch (from the generator), VersionMismatch."""
        await self._call("publish", self._copy, version)

    def _copy(self, version: int) -> None:
        given = [0]
        alone, self._based = self._adapters and self._based, False
        for sink in self._sinks:
            if alone:
                sink.load_adapters(counted(self._source.adapters(), given), version)
            else:
                whole = self._source.parts() if self._adapters else self._source.weights()
                sink.load_weights(counted(whole, given), version)
        stale = [(i, sink.version) for i, sink in enumerate(self._sinks) if sink.version != version]
        if stale:
            raise VersionMismatch(f"after publishing version {version}, generators hold (index, version): {stale}")
        self._based = True
        if self._note is not None:
            self._note({"reshard/bytes_received": (float(given[0]), 1.0)})


def counted(weights: Named, given: list[int]) -> Iterator[tuple[str, Tensor]]:
    """The same stream; given[0] grows by its bytes."""
    for name, tensor in weights:
        given[0] += tensor.numel() * tensor.itemsize
        yield name, tensor
