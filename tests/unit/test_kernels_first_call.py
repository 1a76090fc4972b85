"""The lock for compiling: held at the first call only, waited for, and given up after a while."""

from __future__ import annotations

import fcntl
import threading

import pytest

from docklands.kernels import first_call


def locked(path) -> bool:
    with open(path, "a") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(first_call.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(first_call, "_known", set())
    with first_call.alone_at_first("made"):
        (found,) = tmp_path.iterdir()
    return found


def test_the_first_call_is_alone_and_later_ones_are_free(path) -> None:
    with first_call.alone_at_first("a"):
        assert locked(path)
    with first_call.alone_at_first("a"):
        assert not locked(path)
    with pytest.raises(ValueError), first_call.alone_at_first("b"):
        raise ValueError  # not compiled: the next call is a first one again
    assert not locked(path)
    with first_call.alone_at_first("b"):
        assert locked(path)


def test_another_process_is_waited_for_but_not_for_ever(path, monkeypatch) -> None:
    with open(path, "a") as other:
        fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        threading.Timer(0.2, lambda: fcntl.flock(other.fileno(), fcntl.LOCK_UN)).start()
        with first_call.alone_at_first("a"):
            assert locked(path)
        fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        monkeypatch.setattr(first_call, "WAIT_S", 0.1)
        with first_call.alone_at_first("b"):
            pass
