"""A lease of which a warehouse has lost some rows: what its reader says of them counts no more. One that a put ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.dock_parts import FILTERED, GROUP, PLAIN, options, rows_of

from docklands.core.graph import Graph
from docklands.dock.control import messages as c
from docklands.dock.control.desk import Desk
from docklands.dock.control.recover import align
from docklands.dock.rules.control import Control
from docklands.dock.rules.messages import Ended, Notice
from docklands.errors import DockClosed, DockError


class Talk:
    """A desk, and one client of it."""

    def __init__(self, graph: Graph = PLAIN) -> None:
        self.control = Control(graph, options(1))
        self.desk = Desk(self.control, 1, lambda: 0.0)
        self.say(c.Join("a"))

    def say(self, message, *frames: bytes):
        self.desk.call(b"a", 1, message, list(frames))
        self.desk.settle()
        found, self.desk.outbox = self.desk.outbox, []
        return [reply for _, _, (reply, _) in found]

    def ready(self, *columns: str) -> None:
        for column in columns:
            for stage in self.control.flow.told[column]:
                self.control.notice([Notice(stage, rows_of(0), (column,), np.full(GROUP, 3))])


def test_verdicts_on_rows_that_a_lease_has_lost_meanwhile_are_passed_over() -> None:
    """The reader, who has read all rows before, drops one of those that are lost and one other."""
    talk = Talk()
    control = talk.control
    talk.say(c.Admit([0]), rows_of(0).tobytes())
    talk.ready(*control.flow.sources)
    [rollout] = talk.say(c.Take("rollout"))
    talk.ready(*control.flow.writes["rollout"])
    assert talk.say(c.Finish("rollout", rollout.lease)) == [c.Yes()]
    [taken] = talk.say(c.Take("reward"))
    have = {name: np.full(2, name not in ("reward", "ref_logprobs", "advantage")) for name in control.flow.fields}
    lost, _ = align(control, 0, (rows_of(0)[:2], have, np.full(2, 3)), rebuilt=False)
    assert control.roster.row_id[lost].tolist() == rows_of(0)[2:].tolist()
    talk.ready("reward")
    assert talk.say(c.Finish("reward", taken.lease, {0: "bad", 3: "bad"})) == [c.Yes()]
    assert control.ledger.dropped == {"bad": 1}
    assert control.ledger.alive(control.roster.find(rows_of(0)[2:])).all()


def test_verdicts_on_rows_that_were_never_given_are_refused() -> None:
    talk = Talk()
    talk.say(c.Admit([0]), rows_of(0).tobytes())
    talk.ready(*talk.control.flow.sources)
    [taken] = talk.say(c.Take("rollout"))
    talk.ready(*talk.control.flow.writes["rollout"])
    [reply] = talk.say(c.Finish("rollout", taken.lease, {77: "bad"}))
    assert "dropped rows that it was not given: 77" in reply.message


def rolled_out() -> tuple[Talk, c.Taken]:
    """Group 0 is in the hands of a reader of "reward"."""
    talk = Talk()
    talk.say(c.Admit([0]), rows_of(0).tobytes())
    talk.ready(*talk.control.flow.sources)
    [rollout] = talk.say(c.Take("rollout"))
    talk.ready(*talk.control.flow.writes["rollout"])
    talk.desk.ended(Ended("rollout", rollout.lease, rows_of(0)))
    [taken] = talk.say(c.Take("reward"))
    return talk, taken


def test_a_lease_that_ends_with_a_put_needs_no_word_of_its_reader() -> None:
    talk, taken = rolled_out()
    controller = talk.control.controller("reward")
    talk.desk.ended(Ended("reward", taken.lease, rows_of(0), (2, 99)))  # without the columns: passed over
    assert taken.lease in controller.leases
    talk.ready("reward")
    talk.desk.ended(Ended("reward", taken.lease, rows_of(0), (2, 99)))
    assert not controller.leases and controller.census().done == GROUP
    assert talk.control.counters.stages["reward"].fetches == 4
    late = talk.control.counters.late_acks
    talk.desk.ended(Ended("reward", taken.lease, rows_of(0)))  # said again after a lost line
    assert talk.control.counters.late_acks == late + GROUP and controller.census().done == GROUP
    talk.desk.ended(Ended("reward", 77, rows_of(0)))  # and what was never lent is nothing
    talk.desk.ended(Ended("nobody", 1, rows_of(0)))


def test_an_end_that_was_lost_with_its_line_follows_from_the_inventory() -> None:
    """Columns alone say nothing: the reader may still drop a row of which it has put them. The warehouse knows."""
    talk, taken = rolled_out()
    controller = talk.control.controller("reward")
    unwritten = [name for name in ("ref_logprobs", "advantage") if name in talk.control.flow.fields]
    have = {name: np.full(GROUP, name not in unwritten) for name in talk.control.flow.fields}
    align(talk.control, 0, (rows_of(0), have, np.full(GROUP, 3)), rebuilt=False)
    assert controller.census().leased == GROUP
    for stage, lease in (("nobody", 1), ("reward", 77), ("ref", taken.lease)):
        talk.desk.over(stage, lease)
    assert controller.census().leased == GROUP
    talk.desk.over("reward", taken.lease)
    assert controller.census().done == GROUP and taken.lease not in controller.leases


def test_a_verdict_after_an_inventory_counts() -> None:
    talk, taken = rolled_out()
    talk.ready("reward")
    have = {name: np.full(GROUP, name not in ("ref_logprobs", "advantage")) for name in talk.control.flow.fields}
    align(talk.control, 0, (rows_of(0), have, np.full(GROUP, 3)), rebuilt=False)
    assert talk.say(c.Finish("reward", taken.lease, {2: "error: unlucky"})) == [c.Yes()]
    assert talk.control.ledger.dropped == {"error": 1} and talk.control.counters.late_acks == 0


@pytest.mark.parametrize("lacks", ["pass", "drop"])
def test_a_verdict_whose_record_finds_no_room_on_the_disk_changes_nothing_until_it_is_said_again(lacks: str) -> None:
    talk = Talk(FILTERED)
    control, recorded = talk.control, talk.control.journal
    talk.say(c.Admit([0]), rows_of(0).tobytes())
    talk.ready(*control.flow.sources)
    for stage in ("rollout", "reward"):
        [taken] = talk.say(c.Take(stage))
        talk.ready(*control.flow.writes[stage])
        assert talk.say(c.Finish(stage, taken.lease)) == [c.Yes()]
    [taken] = talk.say(c.Take("filter"))

    def full(what: str, *_: Any) -> None:
        if what == lacks:
            raise DockError("log: no space left on device", "make room on its disk")

    control.journal = full
    [refused] = talk.say(c.Finish("filter", taken.lease, {0: "easy"}))
    assert refused.kind == "DockError" and not control.ledger.dropped
    assert control.leased("filter", taken.lease) is not None
    control.journal = recorded
    assert talk.say(c.Finish("filter", taken.lease, {0: "easy"})) == [c.Yes()]
    assert control.ledger.dropped == {"easy": 1}
    assert talk.say(c.Take("ref"))[0].rows == GROUP - 1


def test_a_stage_that_is_through_works_again_after_a_loss_at_the_end() -> None:
    """The prompts have ended and all rollouts are done: nobody may go, for a warehouse that dies takes them with it."""
    talk, _ = rolled_out()
    control = talk.control
    talk.say(c.End())
    assert talk.say(c.Take("rollout")) == []
    none = np.zeros(0, np.int64)
    align(control, 0, (none, {name: np.zeros(0, bool) for name in control.flow.fields}, none), rebuilt=False)
    talk.ready(*control.flow.sources)
    talk.desk.settle()
    [(_, _, (again, _))] = talk.desk.outbox
    assert isinstance(again, c.Taken) and again.rows == GROUP
    talk.say(c.Drop("rollout", again.lease, "late"))
    with pytest.raises(DockClosed, match="the prompts have ended"):
        control.look_take("rollout", control.want("rollout", None, None), 0.0)
