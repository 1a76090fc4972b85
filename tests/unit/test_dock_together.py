"""Puts that leave together: what each of them hears."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.dock_parts import REWARD_STAGE, ROLLOUT, raised, run, written
from tests.dock_processes import values_of

from docklands.dock.warehouse.together import MOST, Load, Put, Together
from docklands.dock.wire.format import batch_of
from docklands.errors import DockClosed, DockError, TakeTimeout, WarehouseLost

NONE = np.zeros(0, np.int64)


class Lane:
    """Where loads go: `answer(load, now)` says what becomes of each. sent: their rows, in order."""

    def __init__(self, answer: Any = None, wait: asyncio.Event | None = None) -> None:
        self.answer = answer or (lambda load, now: Put({0: 1}, 0, NONE))
        self.wait = wait
        self.sent: list[list[int]] = []
        self.ends: list[float] = []
        self.loads: list[Load] = []

    async def send(self, place: int, stage: str, load: Load, end: float, now: bool) -> Put | None:
        self.sent.append(load.row_ids.tolist())
        self.ends.append(end)
        self.loads.append(load)
        if self.wait is not None:
            await self.wait.wait()
        return self.answer(load, now)


def load(*rows: int, stage: Any = ROLLOUT) -> Load:
    return Load.of(written(stage, np.array(rows)))


def test_what_is_put_in_one_moment_and_meanwhile() -> None:
    """A lone put leaves alone, those of one round together, and those that come meanwhile together after it."""

    async def main() -> Lane:
        lane = Lane(wait=asyncio.Event())
        assert lane.wait is not None
        together = Together(lane.send)
        first = [asyncio.ensure_future(together.put(0, load(i, i + 1), "rollout", 9.0 + i)) for i in (2, 0)]
        other = asyncio.ensure_future(together.put(1, load(6), "rollout", 9.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        late = [asyncio.ensure_future(together.put(0, load(i), "rollout", 5.0)) for i in (4, 5)]
        await asyncio.sleep(0)
        assert lane.sent == [[2, 3, 0, 1], [6]] and lane.ends == [9.0, 9.0]
        lane.wait.set()
        await asyncio.gather(*first, other, *late)
        return lane

    lane = run(main())
    assert lane.sent[2:] == [[4, 5]] and lane.ends[2] == 5.0
    whole = written(ROLLOUT, np.array([2, 3, 0, 1]))
    whole = batch_of(lane.loads[0].row_ids, lane.loads[0].parts, {field.name: field for field in ROLLOUT.writes})
    for field in ROLLOUT.writes:
        assert values_of(whole, field) == values_of(written(ROLLOUT, np.array([2, 3, 0, 1])), field)


@pytest.mark.parametrize("loads", [(load(1), load(1)), (load(1), load(2, stage=REWARD_STAGE))])
def test_the_same_row_or_other_columns_do_not_leave_together(loads: tuple[Load, Load]) -> None:
    async def main() -> Lane:
        lane = Lane()
        await asyncio.gather(*(Together(lane.send).put(0, each, "rollout", 9.0) for each in loads))
        together = Together(lane.send)
        await asyncio.gather(*(together.put(0, each, "rollout", 9.0) for each in loads))
        return lane

    rows = [each.row_ids.tolist() for each in loads]
    assert run(main()).sent == rows + rows


def test_no_message_is_larger_than_that() -> None:
    async def main() -> Lane:
        lane = Lane()
        together = Together(lane.send)
        big = load(*range(3))
        big = Load(big.row_ids, [part for part in big.parts for _ in range(MOST // 2 // big.nbytes)])
        await asyncio.gather(*(together.put(0, Load(big.row_ids + 3 * i, big.parts), "rollout", 9.0) for i in range(5)))
        return lane

    assert [len(rows) // 3 for rows in run(main()).sent] == [2, 2, 1]


def test_each_hears_its_own_part() -> None:
    """Rows that have gone, cells that were there already, and refusals."""

    def answer(load: Load, now: bool) -> Put | None:
        if 9 in load.row_ids:
            raise DockError("row 9 cannot be")
        return Put({0: 7}, 3, np.array([1, 4]))

    async def main() -> tuple[list[Any], Lane]:
        lane = Lane(answer)
        together = Together(lane.send)
        told: list[Any] = await asyncio.gather(*(together.put(0, load(i, i + 1), "s", 9.0) for i in (0, 2, 4)))
        puts = [together.put(0, load(i), "s", 9.0) for i in (8, 9, 10)]
        return [*told, *await asyncio.gather(*puts, return_exceptions=True)], lane

    told, lane = run(main())
    assert [(put.gone.tolist(), put.ignored) for put in told[:3]] == [([1], 3), ([], 0), ([4], 0)]
    assert isinstance(told[3], Put) and isinstance(told[4], DockError) and isinstance(told[5], Put)
    assert lane.sent == [[0, 1, 2, 3, 4, 5], [8, 9, 10], [8], [9], [10]]


def test_who_waits_for_room_holds_up_nobody() -> None:
    """Each waits for room of its own; what comes behind may be what room is made of."""

    async def main() -> list[list[int]]:
        room, lane = asyncio.Event(), Lane()

        async def send(place: int, stage: str, load: Load, end: float, now: bool) -> Put | None:
            await lane.send(place, stage, load, end, now)
            if len(load.row_ids) > 1 and not room.is_set():
                if now:
                    return None
                await room.wait()
            return Put({0: 1}, 0, NONE)

        together = Together(send)
        large = [asyncio.ensure_future(together.put(0, load(i, i + 1), "s", 9.0)) for i in (0, 2)]
        small = [asyncio.ensure_future(together.put(0, load(i), "s", 9.0)) for i in (4, 5)]
        await asyncio.wait_for(asyncio.gather(*small), 5.0)
        await asyncio.wait_for(together.put(0, load(6), "s", 9.0), 5.0)
        assert not any(put.done() for put in large)
        room.set()
        await asyncio.wait_for(asyncio.gather(*large), 5.0)
        return lane.sent

    assert run(main()) == [[0, 1, 2, 3, 4, 5], [0, 1], [2, 3], [4], [5], [6]]


def test_a_deadline_is_of_one_put() -> None:
    """What is late is told so; the others that left with it are said again."""

    async def main() -> tuple[list[Any], list[float]]:
        lane = Lane()

        async def send(place: int, stage: str, load: Load, end: float, now: bool) -> Put | None:
            await lane.send(place, stage, load, end, now)
            if end < 2.0:
                raise TakeTimeout("late")
            return Put({0: 1}, 0, NONE)

        together = Together(send)
        puts = [together.put(0, load(i), "s", end) for i, end in enumerate((1.0, 9.0))]
        return await asyncio.gather(*puts, return_exceptions=True), lane.ends

    (late, there), ends = run(main())
    assert isinstance(late, TakeTimeout) and isinstance(there, Put) and ends == [1.0, 1.0, 9.0]


def test_losses_cancelling_faults_and_the_end() -> None:
    def lost(load: Load, now: bool) -> Put:
        raise WarehouseLost("lost")

    async def main() -> list[list[int]]:
        lane = Lane(lost)
        together = Together(lane.send)
        for put in [together.put(0, load(i), "s", 9.0) for i in range(2)]:
            await raised(WarehouseLost, put)
        assert lane.sent == [[0, 1]]  # nobody tries again
        lane = Lane(lambda load, now: 1 / 0)
        for put in [Together(lane.send).put(0, load(0), "s", 9.0)]:
            with pytest.raises(ZeroDivisionError):
                await put
        lane = Lane(wait=asyncio.Event())
        together = Together(lane.send)
        puts = [together.put(0, load(i), "s", 9.0) for i in range(2)]
        together.put(1, load(7), "s", 9.0).cancel()  # alone, and nobody waits for it
        await asyncio.sleep(0)
        puts += [together.put(0, load(i), "s", 9.0) for i in range(2, 4)]
        puts[0].cancel()
        await asyncio.sleep(0)
        await together.close()
        for put in puts[1:]:
            await raised(DockClosed, put)
        return lane.sent

    assert run(main()) == [[0, 1]]
