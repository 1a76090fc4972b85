"""Nodes of a cluster on one machine: network namespaces with addresses of their own, joined by a bridge."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess

CLONE_NEWNET = 0x40000000


class NoNodes(Exception):
    """The kernel, or a missing right or tool, does not allow network namespaces."""


class Nodes:
    """`count` nodes and this one. Use it as `with Nodes(4) as nodes`. Raises NoNodes, and leaves nothing behind."""

    def __init__(self, count: int) -> None:
        mark = os.getpid() % 100_000
        self.count = count
        self._net = f"10.{200 + mark // 256 % 50}.{mark % 256}"
        self._bridge = f"dkb{mark}"
        self._names = [f"dk{mark}n{i}" for i in range(count)]
        self._ports = [f"dk{mark}p{i}" for i in range(count)]

    def __enter__(self) -> Nodes:
        try:
            command("ip", "link", "add", self._bridge, "type", "bridge")
            command("ip", "addr", "add", f"{self.here}/24", "dev", self._bridge)
            command("ip", "link", "set", self._bridge, "up")
            for i, (name, port) in enumerate(zip(self._names, self._ports)):
                command("ip", "netns", "add", name)
                command("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                command("ip", "link", "set", port, "master", self._bridge, "up")
                command("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    command("ip", "-n", name, "link", "set", device, "up")
        except NoNodes:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for port in self._ports:  # with its other end; a namespace lets go of that only some time after its own end
            with contextlib.suppress(NoNodes):
                command("ip", "link", "del", port)
        for name in self._names:
            with contextlib.suppress(NoNodes):
                command("ip", "netns", "del", name)
        with contextlib.suppress(NoNodes):
            command("ip", "link", "del", self._bridge)

    @property
    def here(self) -> str:
        """This machine's address on the bridge."""
        return f"{self._net}.254"

    def address(self, node: int) -> str:
        return f"{self._net}.{1 + node}"

    def path(self, node: int) -> str:
        """What `enter` needs, in whatever process."""
        return f"/var/run/netns/{self._names[node]}"

    def cut(self, node: int) -> None:
        """Nothing gets to it or from it; nobody is told."""
        command("ip", "link", "set", self._ports[node], "down")

    def heal(self, node: int) -> None:
        command("ip", "link", "set", self._ports[node], "up")

    def shape(self, node: int, mbit: int) -> None:
        """Its link carries so many Mbit/s in each direction, with a queue of 50 ms."""
        limits = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
        command("tc", "qdisc", "replace", "dev", self._ports[node], *limits)
        command("tc", "-n", self._names[node], "qdisc", "replace", "dev", "eth0", *limits)

    def carried(self, node: int) -> int:
        """Bytes that have gone over its link, both ways."""
        folder = f"/sys/class/net/{self._ports[node]}/statistics"
        return sum(int(open(f"{folder}/{name}").read()) for name in ("rx_bytes", "tx_bytes"))  # noqa: SIM115


def enter(path: str) -> None:
    """Move this thread, and those that it starts from now on, to a node."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
            raise NoNodes(f"{path}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)


def command(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except OSError as error:
        raise NoNodes(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        raise NoNodes(f"{' '.join(words)}: {done.stderr.strip()}")
