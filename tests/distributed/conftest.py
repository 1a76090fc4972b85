"""One pool of processes for all distributed tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.cases import MODELS, write_model
from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()
    shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        write_model(name, root / name)
    return root
