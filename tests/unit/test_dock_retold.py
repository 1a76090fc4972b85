"""What a control process does with calls that are said again, that cannot be right, or that speak of lost rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.dock_parts import GROUP, PLAIN, options, rows_of

from docklands.dock.control import messages as c
from docklands.dock.control.desk import Desk
from docklands.dock.control.recover import align, packed
from docklands.dock.rules.control import Control
from docklands.dock.rules.messages import Notice
from docklands.dock.rules.table import unique_ids
from docklands.dock.wire.format import CALL
from docklands.errors import DockError, WireError

A, B = b"client a", b"client b"


class Talk:
    """A desk without a network."""

    def __init__(self, prompts: int = 1, **more: Any) -> None:
        self.desk = Desk(Control(PLAIN, options(prompts, **more)), 1, lambda: 0.0)

    def say(self, client: bytes, message: Any, *frames: Any, number: int = 1) -> Any:
        self.desk.call(client, number, message, [np.asarray(frame).tobytes() for frame in frames])
        return self.turn()

    def turn(self) -> Any:
        self.desk.settle()
        found, self.desk.outbox = self.desk.outbox, []
        return [(client, reply) for client, _, (reply, _) in found]

    def ready(self, row_ids: np.ndarray) -> None:
        """Their source columns are there."""
        for column in self.desk.control.flow.sources:
            for stage in self.desk.control.flow.told[column]:
                self.desk.control.notice([Notice(stage, row_ids, (column,), np.full(len(row_ids), 3))])


def admitted() -> Talk:
    """Group 0 waits for its rollout."""
    talk = Talk()
    talk.say(A, c.Join("a"))
    talk.say(A, c.Admit([0]), rows_of(0))
    talk.ready(rows_of(0))
    return talk


def test_a_state_that_is_not_whole_changes_nothing():
    talk = Talk()
    for state in ({}, [], {"ledger": {"row_ids": 3}}, {**talk.desk.control.state_dict(), "counters": 1}):
        talk.desk.call(A, 1, c.Load(), [packed(state)])
        [(_, reply)] = talk.turn()
        assert reply.kind == "CheckpointError" and not talk.desk.stale
    assert talk.say(A, c.Admit([0]), rows_of(0))[0][1].orders == [0]


def test_a_load_that_is_said_again_waits_for_the_same_answer():
    talk, state = Talk(), packed(admitted().desk.control.state_dict())
    for number in (1, 1, 2):
        talk.desk.call(A, number, c.Load(), [state])
        assert talk.turn() == [] and talk.desk.stale == {0} and len(talk.desk.control.roster) == GROUP


def test_numbers_that_no_array_holds_are_refused_before_anything_is_done():
    for message in (
        c.Admit([2**63]),
        c.Finish("ref", 1, {2**63: "x"}),
        c.Finish("ref", 2**63),
        c.Retire("ref", 0, (2**63, 1)),
        c.Take("ref", ranks=10**6),
        c.Join("a", [2**63]),
    ):
        with pytest.raises(WireError):
            c.CALLS.unpack(c.CALLS.pack(CALL, 1, message))


def test_an_acknowledgement_that_is_said_again_to_an_empty_control_is_passed_over():
    talk = Talk()
    assert talk.say(A, c.Retire("", 0), rows_of(0)) == [(A, c.Yes())]
    assert talk.say(A, c.Drop("", 0, "late"), rows_of(0)) == [(A, c.Yes())]


def test_a_group_whose_record_finds_no_room_on_the_disk_enters_when_it_is_said_again():
    talk = Talk()
    control, recorded = talk.desk.control, talk.desk.control.journal

    def full(*_: Any) -> None:
        raise DockError("log: no space left on device", "make room on its disk")

    control.journal = full
    assert talk.say(A, c.Admit([0]), rows_of(0))[0][1].kind == "DockError"
    assert len(control.roster) == control.ledger.admitted == 0
    control.journal = recorded
    assert talk.say(A, c.Admit([0]), rows_of(0))[0][1].orders == [0]
    assert control.controller("rollout").census().waiting == GROUP


def test_an_empty_part_is_acknowledged():
    talk = admitted()
    assert talk.say(A, c.Finish("ref", 0), np.zeros(0, np.int64)) == [(A, c.Yes())]


def test_nothing_is_freed_until_the_last_of_those_who_save_is_through():
    talk = Talk()
    for client in (A, B):
        talk.say(client, c.Join("x"))
        talk.say(client, c.Save())
    talk.say(A, c.Saved())
    assert talk.desk.frozen == {B} and not talk.desk.thawed
    talk.desk.leave(B)
    assert not talk.desk.frozen and talk.desk.thawed


def test_a_take_says_which_rows_were_made_anew():
    talk = admitted()
    talk.desk.lives = {1: 7}
    [(_, taken)] = talk.say(A, c.Take("rollout"))
    assert taken.lives == [0, 7, 0, 0]
    talk.say(A, c.Drop("rollout", taken.lease, "bad"))
    assert talk.desk.lives == {}


def test_a_row_twice_is_seen_also_where_differences_wrap_around():
    quarter = 1 << 62
    ids = np.array([0, quarter, -2 * quarter, -quarter, 0])
    assert not unique_ids(ids) and unique_ids(ids[1:]) and unique_ids(np.array([-2 * quarter, 0, quarter]))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_group_is_taken_whole_also_when_its_warehouse_has_lost_a_part_of_it(deterministic: bool):
    """It stood in the queue, whole; then half of it is lost: the other half alone is not handed out."""
    talk = Talk(deterministic=deterministic)
    control, first, last = talk.desk.control, rows_of(0)[:2], rows_of(0)[2:]
    talk.say(A, c.Join("a"))
    talk.say(A, c.Admit([0]), rows_of(0))
    talk.ready(first)
    want = control.want("rollout", 1, None)
    assert control.look_take("rollout", want, 0.0) is None
    talk.ready(last)
    have = {name: np.ones(2, bool) if name in control.flow.sources else np.zeros(2, bool) for name in control.flow.told}
    lost, _ = align(control, 0, (first, have, np.full(2, 3)), rebuilt=False)
    assert control.roster.row_id[lost].tolist() == last.tolist()
    assert control.look_take("rollout", want, 0.0) is None
    talk.ready(last)
    rows = control.look_take("rollout", want, 0.0)
    assert rows is not None and rows.row_ids.tolist() == rows_of(0).tolist()


def test_a_rank_that_waits_is_served_when_another_ones_take_comes_with_the_rows():
    """The rows and the take of rank 0, which divides them, come in one turn: nothing is left but what is set aside."""
    talk = Talk()
    talk.say(A, c.Join("a"))
    talk.say(A, c.Admit([0]), rows_of(0))
    assert talk.say(B, c.Take("rollout", rank=1, ranks=2)) == []
    talk.ready(rows_of(0))
    served = {client: reply.rows for client, reply in talk.say(A, c.Take("rollout", rank=0, ranks=2))}
    assert served.keys() == {A, B} and sum(served.values()) == GROUP


def test_a_take_of_many_groups_is_tried_again_only_when_they_are_there(monkeypatch: pytest.MonkeyPatch):
    """Also where its reader wants fewer than another one, or where no more groups will come."""
    talk, tried = Talk(4), []
    control = talk.desk.control
    monkeypatch.setattr(control, "look_take", lambda *a, look=control.look_take: (tried.append(a), look(*a))[1])
    talk.say(A, c.Join("a"))
    for group in range(4):
        talk.say(A, c.Admit([group]), rows_of(group))
    assert talk.say(A, c.Take("rollout", groups=4)) == talk.say(B, c.Take("rollout", groups=3), number=2) == []
    assert len(tried) == 2
    for group in range(2):
        talk.ready(rows_of(group))
        assert talk.turn() == [] and len(tried) == 2
    talk.ready(rows_of(2))
    assert [(client, reply.rows) for client, reply in talk.turn()] == [(B, 3 * GROUP)]
    talk.ready(rows_of(3))
    assert talk.turn() == []
    ended = talk.say(A, c.End(), number=3)
    assert [reply.rows for _, reply in ended if isinstance(reply, c.Taken)] == [GROUP]
