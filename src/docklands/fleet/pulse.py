"""Signs of life: each worker tells the driver several times within a deadline that it runs, and what it is doing.

A process that is stopped, swapped out, or stuck in native code with Python's lock held says nothing any more; nor does
one whose node is gone, which no connection would tell for minutes. A process that waits for a peer goes on to give
signs: that wait has a deadline of its own. They are datagrams: a lost one is followed by others. A worker that has
never been heard is never missed, so a network that carries no datagrams only switches this off.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable

log = logging.getLogger("docklands.fleet")

OFTEN = 6
"""Signs within the deadline."""
WORDS = 512
"""Bytes of a sign at most."""


def send_beats(home: str, pulse: tuple[int, str], deadline_s: float, words: Callable[[], str]) -> None:
    """In a worker: from now on, to the driver at (home, port). words: rank, and what it is doing."""
    port, token = pulse

    def run() -> None:
        family = socket.AF_INET6 if ":" in home else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            while True:
                with contextlib.suppress(OSError):
                    sender.sendto(f"{token} {words()}".encode()[:WORDS], (home, port))
                time.sleep(deadline_s / OFTEN)

    threading.Thread(target=run, name="pulse", daemon=True).start()


class Pulse:
    """In the driver: listens for the workers of one world.

    silent  called once, on the thread that listens, with the rank of a worker that has been silent for `deadline_s`
            seconds, and what it was doing
    """

    def __init__(self, deadline_s: float, silent: Callable[[int, str], None]) -> None:
        self.deadline_s, self._silent = deadline_s, silent
        self._token = secrets.token_hex(8)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.settimeout(deadline_s / OFTEN)
        self._heard: dict[int, tuple[float, str]] = {}
        self._over = False
        self._thread = threading.Thread(target=self._listen, name="pulse", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[int, str]:
        """(port, word that signs begin with)."""
        return self._socket.getsockname()[1], self._token

    def _listen(self) -> None:
        awake = time.monotonic()
        while not self._over:
            with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
                token, rank, words = self._socket.recv(WORDS).decode().split(" ", 2)
                if token == self._token:
                    self._heard[int(rank)] = time.monotonic(), words
            now = time.monotonic()
            if now - awake > self.deadline_s / 2:  # this process was stopped itself: signs wait to be read
                self._heard = {rank: (now, words) for rank, (_, words) in self._heard.items()}
            awake = now
            for rank, (last, words) in list(self._heard.items()):
                if now - last > self.deadline_s and not self._over:
                    del self._heard[rank]
                    self._silent(rank, words)
                    awake = time.monotonic()

    def close(self) -> None:
        """Listen no more."""
        self._over = True
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError):  # wake it: its wait is as long as the time between signs
                self._socket.sendto(b"", ("127.0.0.1", self.address[0]))
            self._thread.join(2 * self.deadline_s / OFTEN)
        self._socket.close()
