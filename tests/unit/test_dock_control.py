"""The control process without its process: calls that wait, calls said twice, joins, bad messages, idleness."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from tests.dock_parts import FILTERED, GROUP, PLAIN, options, rows_of
from tests.dock_talk import A, B, Talk, admitted

from docklands.core.protocols import Rows
from docklands.dock.control import messages as c
from docklands.dock.control.desk import GRACE_S
from docklands.dock.control.links import Warehouse
from docklands.dock.control.recover import Journal, align, packed
from docklands.dock.control.server import ControlOptions, Server
from docklands.dock.rules.control import SLOT, Control
from docklands.dock.rules.messages import Notice
from docklands.dock.rules.table import NO_ROWS
from docklands.dock.warehouse.messages import Failure
from docklands.dock.wire.format import CALL, REPLY
from docklands.dock.wire.net import Connection, Peer, make_keys
from docklands.errors import CheckpointError, ConfigError


def test_a_take_waits_without_a_reply_and_is_answered_by_the_notice():
    talk = Talk()
    talk.say(A, c.Join("a"))
    assert talk.say(B, c.Take("rollout")) == []
    assert talk.say(A, c.Admit([0]), rows_of(0))[0][1].places == [0]
    talk.ready(0, *talk.desk.control.flow.sources)
    [(client, reply)] = talk.turn()
    assert client == B and reply.rows == GROUP


def test_waiting_readers_are_served_in_order_and_alike_wants_are_not_tried_in_vain():
    talk = admitted(max_staleness=3, groups_per_take=1)
    for client in (A, B, A):
        assert talk.say(client, c.Take("rollout")) == []
    tries = []
    control = talk.desk.control
    look = control.look_take
    control.look_take = lambda *args: tries.append(args) or look(*args)  # type: ignore[method-assign]
    talk.desk.wake("rollout")
    assert len(tries) == 1
    talk.say(A, c.Admit([0]), rows_of(0))
    talk.ready(0, *control.flow.sources)
    assert [client for client, _ in talk.turn()] == [A]


def test_a_take_that_is_said_again_waits_once():
    talk = Talk()
    talk.say(A, c.Join("a"))
    assert talk.say(A, c.Take("rollout"), number=8) == talk.say(A, c.Take("rollout"), number=8) == []
    talk.say(A, c.Admit([0]), rows_of(0))
    talk.ready(0, *talk.desk.control.flow.sources)
    assert len(talk.turn()) == 1


def test_every_wait_ends_at_its_deadline_and_says_what_it_waited_for():
    talk = admitted(0, wait_s=5.0, lease_s=1000.0)
    talk.say(A, c.Take("rollout"))
    assert talk.say(B, c.Take("update")) == talk.say(B, c.Slot()) == talk.say(B, c.Take("ref", wait_s=2.0)) == []
    assert talk.desk.next_deadline() == 102.0
    talk.now = 102.5
    [(_, reply)] = talk.turn()
    assert isinstance(reply, Failure) and reply.kind == "TakeTimeout" and "stage 'ref' waited 2.0 s" in reply.message
    talk.now = 105.0
    texts = [reply.message for _, reply in talk.turn()]
    assert "stage 'update' waited 5.0 s: a step is 1 groups, 1 groups are pending" in texts[0] + texts[1]
    assert "1 of 1 groups are in flight" in texts[0] + texts[1]


def test_a_finish_waits_for_the_notices_of_what_was_put_and_says_so_if_they_never_come():
    talk = admitted(0)
    [(_, taken)] = talk.say(A, c.Take("rollout"))
    finish = c.Finish("rollout", taken.lease)
    assert talk.say(A, finish, rows_of(0)) == []
    talk.ready(0, *talk.desk.control.flow.writes["rollout"])
    talk.desk.wake("@notices")
    assert talk.turn() == [(A, c.Yes())]
    [(_, taken)] = talk.say(A, c.Take("ref"))
    assert talk.say(A, c.Finish("ref", taken.lease), rows_of(0)) == []
    talk.now += GRACE_S
    assert "finished rows without writing ref_logprobs: 0, 1" in talk.turn()[0][1].message


def test_a_client_that_joins_again_keeps_the_leases_that_it_names():
    talk = admitted(0)
    talk.ready(0, *talk.desk.control.flow.writes["rollout"])
    [(_, kept)] = talk.say(A, c.Take("ref"))
    talk.say(A, c.Take("rollout"))
    talk.say(A, c.Join("a", [0, 5], [("ref", kept.lease)]))
    leases = {name: list(held.leases) for name, held in talk.desk.control.controllers.items()}
    assert leases["ref"] == [kept.lease] and leases["rollout"] == []
    assert talk.desk.clients[A].groups == {0} and talk.desk.clients[A].gone == [5]
    assert "a: 4 leased rows are free again" in talk.desk.leave(A)


@pytest.mark.parametrize(
    ("message", "rows", "says"),
    [
        (c.Take("updat"), None, "no stage 'updat'"),
        (c.Take("ref", groups=9), None, "take of 9 groups"),
        (c.Take("ref", rank=3, ranks=2), None, "rank 3 of 2"),
        (c.Admit([1], 4), rows_of(1), "warehouse 4 of 1"),
        (c.Admit([1]), rows_of(1)[:2], "2 different rows, group_size is 4"),
        (c.Admit([1]), None, "expected one frame of row ids"),
        (c.Retire("update", 0), np.array([1, 1]), "names a row twice"),
        (c.Finish("ref", 12345), rows_of(0), "never gave out the lease 12345"),
        (c.GiveBack("nothing", 1), None, "no stage 'nothing'"),
        (c.Load(), np.arange(5), "cannot be read"),
        (c.Take("ref", wait_s=float("nan"), groups=9), None, "take of 9 groups"),
    ],
)
def test_what_cannot_be_right_is_one_line(message, rows, says):
    [(_, reply)] = admitted(0).say(A, message, rows)
    assert isinstance(reply, Failure) and says in reply.message


def test_a_graph_survives_its_journey_without_its_functions():
    again = c.graph_of(msgspec.json.decode(msgspec.json.encode(c.graph_meta(FILTERED)), type=c.GraphMeta))
    assert [repr(s) for s in again.stages] == [repr(s) for s in FILTERED.stages]
    columns = [[repr(f) for f in (*s.reads, *s.writes)] for s in again.stages]
    assert columns == [[repr(f) for f in (*s.reads, *s.writes)] for s in FILTERED.stages]
    assert {repr(f) for f in again.fields} == {repr(f) for f in FILTERED.fields}


def test_a_damaged_journal_is_an_error_and_a_torn_end_is_not(tmp_path: Path):
    path = tmp_path / "journal"
    control = Control(PLAIN, options(2))
    journal = Journal(path, control)
    control.admit(rows_of(0), 0)
    control.admit(rows_of(1), 1)
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    torn = Control(PLAIN, options(2))
    Journal(path, torn).close()
    assert torn.ledger.in_flight == 1
    path.write_bytes(whole[:40] + b"\x55" + whole[41:])
    with pytest.raises(CheckpointError, match="damaged at byte 0"):
        Journal(path, Control(PLAIN, options(2)))


def test_a_journal_stays_small_and_leads_to_the_same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("docklands.dock.control.recover.COMPACT_BYTES", 20_000)
    control = Control(PLAIN, options(2))
    journal = Journal(tmp_path / "journal", control)
    sizes = []
    for index in range(400):
        control.admit(rows_of(index), index)
        reason = {int(row): "error: no" for row in rows_of(index)[:1]}
        control.drop_rows(reason, None)
        rows = Rows(rows_of(index)[1:], NO_ROWS, NO_ROWS, NO_ROWS)
        control.retire(rows)
        control.settle()
        journal.turn()
        sizes.append((tmp_path / "journal").stat().st_size)
    assert max(sizes) < 40_000
    control.admit(rows_of(400), 400)
    control.end_of_prompts()
    journal.close()
    again = Control(PLAIN, options(2))
    reopened = Journal(tmp_path / "journal", again)
    assert reopened.epoch == 2 and reopened.replayed
    reopened.close()
    assert vars(again.ledger)["dropped"] == {"error": 400}
    assert (again.ledger.retired, again.ledger.in_flight, again.ledger.ended) == (400, 1, True)
    assert packed(again.state_dict()["ledger"]) == packed(control.state_dict()["ledger"])


# --- behind a socket -----------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Server, Connection]]:
    """A control server in a thread, and a line to it. Its one warehouse is never there."""
    keys, own = make_keys(), make_keys()
    made = Server(
        ControlOptions(
            graph=c.graph_meta(PLAIN),
            dock=options(1, wait_s=600.0),
            warehouses=[Warehouse("tcp://127.0.0.1:9", own.public)],
            public_key=own.public,
            secret_key=own.secret,
            allowed=[keys.public],
        )
    )
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    context = zmq.Context()
    line = Connection(context, Peer(made.listener.endpoint, own.public), keys)
    yield made, line
    line.send([c.CALLS.pack(CALL, 1, c.Quit())])
    thread.join(10.0)
    line.close()
    context.destroy(linger=0)
    assert not thread.is_alive()
    made.close()


def ask(line: Connection, number: int, message: msgspec.Struct):
    line.send([c.CALLS.pack(CALL, number, message)])
    return answer(line)


def answer(line: Connection):
    """The next reply; what is pushed in between says where the warehouses are."""
    while line.socket.poll(10_000):
        found = c.REPLIES.unpack(line.socket.recv_multipart()[0])
        if found[0] == REPLY:
            return found
    raise AssertionError("no reply")


def test_an_idle_control_process_does_not_turn(server):
    made, line = server
    assert ask(line, 1, c.Join("idle"))[2].epoch == 1
    line.send([c.CALLS.pack(CALL, 2, c.Take("rollout"))])
    time.sleep(0.2)
    before = made.turns
    time.sleep(0.7)  # the warehouse that is not there is called again meanwhile; that wakes ZeroMQ, not this thread
    assert made.turns - before <= 1


def test_bad_frames_are_counted_and_answered_and_change_nothing(server):
    made, line = server
    good = c.CALLS.pack(CALL, 3, c.Take("ref"))
    bad = [
        b"",
        b"DK",
        secrets.token_bytes(200),
        good[:-1],
        good[:2] + b"\xff" + good[3:],
        c.REPLIES.pack(REPLY, 1, c.Yes()),
    ]
    for frame in bad:
        line.send([frame])
        kind, _, reply = answer(line)
        assert kind == REPLY and isinstance(reply, Failure) and reply.kind == "WireError", frame
    assert made.bad_messages == len(bad)
    assert ask(line, 4, c.Join("still there"))[1] == 4


def test_a_stranger_gets_nothing(server):
    made, line = server
    context = zmq.Context()
    stranger = Connection(context, line.peer, make_keys())
    stranger.send([c.CALLS.pack(CALL, 1, c.Join("stranger"))])
    assert not stranger.socket.poll(300)
    stranger.close()
    context.destroy(linger=0)
    assert made.listener.denied >= 1 and not made.desk.clients


def test_the_number_of_warehouses_must_fit():
    given = ControlOptions(graph=c.graph_meta(PLAIN), dock=options(1, warehouses=2), warehouses=[])
    with pytest.raises(ConfigError, match="0 warehouses are named, 2 set"):
        Server(given)


def test_a_block_that_is_another_groups_by_now_is_handed_out_in_its_new_turn():
    """Group 0 leaves before anybody took it, its block becomes group 2's: the old entry of the queue says nothing."""
    talk = admitted(0, 1, max_staleness=2)
    talk.say(A, c.Drop("", 0, "unlucky"), rows_of(0))
    talk.say(A, c.Admit([2]), rows_of(2))
    talk.ready(2, *talk.desk.control.flow.sources)
    roster = talk.desk.control.roster
    assert sorted(roster.by_group[group] for group in (1, 2)) == [0, 1]  # else the test shows nothing
    rows = talk.desk.control.look_take("rollout", talk.desk.control.want("rollout", 2, None), talk.now)
    assert rows is not None and rows.row_ids.tolist() == [*rows_of(1), *rows_of(2)]


def test_rows_that_had_left_are_waited_for_by_nobody_after_a_loss():
    """The reward dropped row 0, which ref could still have read; then all is lost, and nobody admits row 0 again."""
    talk = admitted(0, max_staleness=1)
    control = talk.desk.control

    def take(stage: str) -> Rows:
        rows = control.look_take(stage, control.want(stage, None, None), talk.now)
        assert rows is not None, stage
        return rows

    def write(stage: str) -> None:
        talk.ready(0, *control.flow.writes[stage])

    rows = take("rollout")
    write("rollout")
    control.finish(rows, {})
    rows = take("reward")
    write("reward")
    control.finish(rows, {0: "error"})
    talk.turn()
    none = np.zeros(0, np.int64)
    have = {name: np.zeros(0, bool) for name in control.flow.fields}
    talk.say(A, c.Admit([1]), rows_of(1))  # announced here, and on its way to the warehouse
    assert (control.roster.find(rows_of(1)) >= 0).all()
    lost, vain = align(control, 0, (none, have, none), rebuilt=False, same=True)
    assert control.roster.row_id[lost].tolist() == [1, 2, 3] and not len(vain)
    control.notice(
        Notice(stage, rows_of(0)[1:], (name,), np.full(3, 3))
        for name in control.flow.sources
        for stage in control.flow.told[name]
    )
    rows = take("rollout")
    assert rows.row_ids.tolist() == [1, 2, 3]
    write("rollout")
    control.finish(rows, {})
    assert take("ref").row_ids.tolist() == [1, 2, 3]


def test_ranks_that_wait_are_all_served_when_a_round_is_formed():
    """The first one forms it, and then nothing is ready any more; the others' parts are set aside for them."""
    talk = Talk()
    talk.say(A, c.Join("a"))
    assert talk.say(A, c.Take("rollout", rank=1, ranks=2)) == talk.say(B, c.Take("rollout", rank=0, ranks=2)) == []
    talk.say(A, c.Admit([0]), rows_of(0))
    talk.ready(0, *talk.desk.control.flow.sources)
    served = {client: reply.rows for client, reply in talk.turn()}  # type: ignore[attr-defined]
    assert served.keys() == {A, B} and sum(served.values()) == GROUP


def test_an_acknowledgement_names_its_rows_only_when_its_lease_has_ended():
    talk = admitted(0, max_staleness=1, lease_s=10.0)
    [(_, taken)] = talk.say(A, c.Take("rollout"))
    talk.ready(0, *talk.desk.control.flow.writes["rollout"])
    assert talk.say(A, c.Finish("rollout", taken.lease)) == [(A, c.Yes())]  # type: ignore[attr-defined]
    assert talk.desk.control.controllers["rollout"].pending == 0
    assert talk.say(A, c.Finish("rollout", taken.lease)) == [(A, c.Yes(False))]  # type: ignore[attr-defined]
    assert talk.say(A, c.Finish("rollout", taken.lease), rows_of(0)) == [(A, c.Yes())]  # type: ignore[attr-defined]
    assert talk.desk.control.counters.late_acks == GROUP


def test_nothing_enters_before_every_warehouse_was_heard_once():
    """What it is given before would count as lost when it says what it holds. A lost group's prompts may come."""
    talk = Talk()
    talk.say(A, c.Join("a"))
    talk.desk.mute = {0}
    assert talk.say(A, c.Admit([0]), rows_of(0), 7) == []
    talk.now += talk.desk.control.options.wait_s + 1
    ((_, late),) = talk.turn()
    assert isinstance(late, c.Failure) and "warehouses [0] have not said what they hold" in late.message
    assert talk.say(A, c.Admit([0]), rows_of(0), 8) == []
    talk.desk.mute.clear()
    talk.desk.wake(SLOT)
    assert [(who, reply.places) for who, reply in talk.turn()] == [(A, [0])]


def test_groups_enter_together_or_not_at_all():
    talk = Talk(max_staleness=2)
    talk.say(A, c.Join("a"))
    both = np.concatenate([rows_of(0), rows_of(1)])
    assert talk.say(A, c.Admit([0, 1]), both)[0][1].orders == [0, 1]
    assert talk.say(A, c.Admit([1, 2]), np.concatenate([rows_of(1), rows_of(2)]))[0][1].orders == [1, 2]
    assert talk.say(A, c.Admit([3, 4]), np.concatenate([rows_of(3), rows_of(4)])) == []  # no slot for two
    assert sorted(talk.desk.control.roster.by_group) == [0, 1, 2]
    for groups, rows, says in (([5, 5], both, "groups are of one size"), ([5, 6, 7, 8], rows_of(5), "at most 3")):
        [(_, reply)] = talk.say(A, c.Admit(groups), rows)
        assert says in f"{reply.message} {reply.hint}"  # type: ignore[attr-defined]
