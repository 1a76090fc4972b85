"""What is told of another library's error."""

from __future__ import annotations

from docklands.errors import reason_of


def test_the_last_line_without_the_place_in_torchs_sources() -> None:
    error = RuntimeError("first\n[/pytorch/third_party/gloo/pair.cc:525] Connection closed by peer [127.0.0.1]:1")
    assert reason_of(error) == "Connection closed by peer [127.0.0.1]:1"
    assert reason_of(ValueError()) == "ValueError" and len(reason_of(ValueError("x" * 999))) == 160
