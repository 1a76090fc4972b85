"""The lock for compiling: held at the first call only, waited for, and given up after a while. Where code is kept."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from docklands.kernels import compiled_cache, first_call


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


def test_compiled_code_is_kept_for_this_very_code(tmp_path, monkeypatch) -> None:
    """A change in any of the files that are compiled: another folder. One that cannot be written: none."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(compiled_cache, "__file__", str(tmp_path / "compiled_cache.py"))
    found = []
    for text in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "compiled_called.py").write_text(text)
        compiled_cache.folder.cache_clear()
        found.append(compiled_cache.folder())
    assert found[0] == found[2] != found[1] and all(Path(place).parent == tmp_path / "kept" for place in found)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled_called.py"))
    compiled_cache.folder.cache_clear()
    assert compiled_cache.folder() == ""
    compiled_cache.folder.cache_clear()
