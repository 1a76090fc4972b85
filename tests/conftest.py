"""What every test shares: one thread, reproducible hypothesis, a clean cache directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SOURCE = str(Path(__file__).resolve().parents[1] / "src")
if SOURCE in sys.path:  # processes that tests start find the package too, installed or not
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))

torch.set_num_threads(1)

settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def same_seed() -> Iterator[None]:
    """Each test starts from one global torch seed and leaves the thread count as it found it."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
