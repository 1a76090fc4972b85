"""What every test shares: one thread, reproducible hypothesis, a clean cache directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


LONG = (
    "distributed/", "e2e/test_dashboard_", "e2e/test_dock_in_processes", "e2e/test_fleet_", "e2e/test_howto",
    "e2e/test_layout", "e2e/test_lora", "e2e/test_metrics", "e2e/test_moe", "e2e/test_reshard_run",
    "e2e/test_run_directory", "e2e/test_long_tail", "e2e/test_sharded_runs", "e2e/test_slow_prompts",
    "e2e/test_end_of_data",
    "parity/test_models_m",
    "property/test_dock_", "property/test_sync_", "property/test_wire", "unit/test_plan", "unit/test_router_",
    "unit/test_sync_", "unit/test_train_savers", "unit/test_warehouse_",
)  # fmt: skip
"""Whole files that `make test-fast` leaves out: several processes, several runs, many examples."""


OWN = ("test_dock_", "test_fleet_", "test_warehouse")
"""Files of distributed/ that start processes of their own; the others share a pool of ranks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of LONG as slow."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).as_posix().startswith(LONG):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where pytest runs several processes, a file stays with one of them, and so do all tests that share the pool of
    ranks. In the order of their names, which is about longest first: distributed and e2e come before unit, so that
    none is left with a long file at the end.
    """
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder, _, name = file.rpartition("/")
            return folder if folder.endswith("distributed") and not name.startswith(OWN) else file

    config.option.loadscopereorder = False
    return Together(config, log)


@pytest.fixture(autouse=True)
def same_seed() -> Iterator[None]:
    """Each test starts from one global torch seed and leaves the thread count as it found it."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
