"""Takes that name places on the reader's node."""

from __future__ import annotations

import numpy as np
import pytest
from tests.dock_parts import GROUP, PLAIN, options
from tests.dock_talk import A, B, Talk

from docklands.dock.control import messages as c
from docklands.dock.control.desk import Desk
from docklands.dock.rules.control import Control
from docklands.dock.rules.controller import NEAR_S


def test_a_reader_gets_its_own_nodes_groups_and_others_only_when_they_have_stood_for_a_while():
    """Two places, steps of two groups: what is older than a step is not passed over."""
    talk = Talk()
    talk.desk = Desk(Control(PLAIN, options(2, warehouses=2, max_staleness=1)), 2, lambda: talk.now)
    sources = talk.desk.control.flow.sources
    talk.say(A, c.Join("a"))
    assert talk.say(B, c.Take("rollout", groups=1, near=[1])) == []
    talk.say(A, c.Admit([0, 1, 2, 3], [0, 1, 0, 1]), np.arange(4 * GROUP))
    talk.ready(0, *sources)
    assert talk.turn() == [] and talk.desk.next_deadline() == pytest.approx(talk.now + NEAR_S)
    talk.ready(1, *sources)
    taken = [talk.turn(), talk.say(A, c.Take("rollout", groups=1, near=[0]))]
    for group in (2, 3):
        talk.ready(group, *sources)
    taken.append(talk.say(B, c.Take("rollout", groups=1, near=[1])))
    leases = talk.desk.control.controllers["rollout"].leases.values()
    assert [len(found) for found in taken] == [1, 1, 1]
    assert [held.slots[0] // GROUP for held in leases] == [1, 0, 3]
    assert talk.say(B, c.Take("rollout", groups=1, near=[1])) == []
    talk.now += NEAR_S
    assert len(talk.turn()) == 1 and talk.desk.control.controllers["rollout"].held(4)[0] == 2 * GROUP
    assert talk.desk.next_deadline() > talk.now + 1.0  # nothing is waited for any more


def test_a_group_is_passed_over_only_within_a_step():
    talk = Talk()
    talk.desk = Desk(Control(PLAIN, options(2, warehouses=2, max_staleness=1)), 2, lambda: talk.now)
    talk.say(A, c.Join("a"))
    talk.say(A, c.Admit([0, 1, 2, 3], [0, 0, 1, 1]), np.arange(4 * GROUP))
    for group in range(4):
        talk.ready(group, *talk.desk.control.flow.sources)
    assert talk.say(B, c.Take("rollout", groups=1, near=[1])) == []
    talk.now += NEAR_S
    assert len(talk.turn()) == 1 and talk.desk.control.controllers["rollout"].held(1)[0] == 0
    assert len(talk.say(B, c.Take("rollout", groups=1, near=[1]))) == 1
    assert talk.desk.control.controllers["rollout"].held(2)[0] == 2 * GROUP
