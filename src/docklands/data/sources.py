"""Where rows come from: files, `datasets` directories and tasks, all seen as an indexable list of rows."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from docklands.data.rows import plain, prompt_key_text
from docklands.errors import ConfigError, DataError

Row = dict[str, Any]
READ_HINT = (
    "data.source takes .jsonl, .json, .parquet, a `datasets` directory, task:NAME, reasoning_gym:NAME, "
    "demonstrations:NAME or preferences:NAME"
)


class Source(Protocol):
    """An indexable, finite list of rows. `where(i)` names row i for error messages.

    in_memory  every row can be looked at in little time
    """

    name: str

    @property
    def in_memory(self) -> bool: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str: ...


class ListSource:
    """Rows held in memory; `numbers` are the line or row numbers shown in messages (1-based)."""

    in_memory = True

    def __init__(self, name: str, rows: Sequence[Row], unit: str = "row", numbers: Sequence[int] | None = None) -> None:
        if not rows:
            raise DataError(f"{name}: no rows")
        self.name = name
        self._rows = rows
        self._unit = unit
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self.name}, {self._unit} {self._numbers[index] if self._numbers else index + 1}"


class DatasetSource:
    """A `datasets` table on disk, read row by row."""

    in_memory = False

    def __init__(self, name: str, table: Any) -> None:
        if not len(table):
            raise DataError(f"{name}: no rows")
        self.name = name
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        return dict(self._table[index])

    def where(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


class Subset:
    """Some rows of another source, in the given order."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray, label: str) -> None:
        if not len(indices):
            raise DataError(f"{source.name}: the {label} part is empty")
        self.name = f"{source.name}[{label}]"
        self.in_memory = source.in_memory
        self._source = source
        self._indices = np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._source[int(self._indices[index])]

    def where(self, index: int) -> str:
        return self._source.where(int(self._indices[index]))


def open_file(spec: str) -> Source:
    """A source from a path. DataError when it is missing, empty, malformed or of an unknown kind."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return _open_dataset_directory(path)
    if not path.is_file():
        raise DataError(f"data source {spec!r} does not exist", READ_HINT)
    readers = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"data source {spec!r}: unknown kind {path.suffix!r}", READ_HINT)
    return reader(path)


def _read_jsonl(path: Path) -> Source:
    rows: list[Row] = []
    numbers: list[int] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_object(_parse(line, f"{path}, line {number}"), f"{path}, line {number}"))
                    numbers.append(number)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return ListSource(str(path), rows, "line", numbers)


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}", "one JSON object a line; a list of objects is .json") from error
    except RecursionError:
        raise DataError(f"{where}: JSON nested too deep to be read", "keep such a value as text") from None


def _read_json(path: Path) -> Source:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON: {error}", "one object a line is .jsonl") from error
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise DataError(f"{path}: expected a list of objects, found {type(content).__name__}")
    return ListSource(str(path), [_object(row, f"{path}, row {i + 1}") for i, row in enumerate(content)])


def _read_parquet(path: Path) -> Source:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{path}: reading parquet needs pyarrow", "pip install pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as parquet: {' '.join(str(error).split())}") from error
    return ListSource(str(path), rows)


def _open_dataset_directory(path: Path) -> Source:
    """A directory written by `datasets.save_to_disk`; of a dict of splits, `train` or the only one."""
    if not any((path / marker).is_file() for marker in ("dataset_info.json", "dataset_dict.json", "state.json")):
        raise DataError(f"data source {str(path)!r}: a directory that `datasets` did not write", READ_HINT)
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"{path}: reading this directory needs the `datasets` package", "pip install datasets")
    import datasets

    try:
        table = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: not readable by `datasets`: {' '.join(str(error).split())}") from error
    if isinstance(table, datasets.DatasetDict):
        split = "train" if "train" in table else next(iter(table), None)
        if split is None or (split != "train" and len(table) > 1):
            raise DataError(f"{path}: no 'train' among its splits {sorted(map(str, table))}", "name one: PATH/SPLIT")
        return DatasetSource(f"{path}/{split}", table[split])
    return DatasetSource(str(path), table)


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def split_held_out(source: Source, count: int, seed: int, prompt_key: str = "prompt") -> tuple[Source, Source]:
    """(training part, held-out part): `count` seeded rows, and no prompt text on both sides.

    Rows whose prompt equals a held-out one leave the training part too, so duplicates cannot leak.
    Raises DataError when the source has too few distinct prompts.
    """
    if not 0 < count < len(source):
        raise DataError(
            f"{source.name}: cannot hold out {count} of {len(source)} rows", "lower eval.prompts or set eval.source"
        )
    keys = [_key(source[i], prompt_key, source.where(i)) for i in range(len(source))]
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 0x48454C44]))).permutation(len(source))
    chosen: dict[bytes, int] = {}
    for index in order:
        chosen.setdefault(keys[index], int(index))
        if len(chosen) == count:
            break
    train = [i for i, key in enumerate(keys) if key not in chosen]
    if len(chosen) < count or not train:
        raise DataError(
            f"{source.name}: {len(set(keys))} distinct prompts are too few to hold out {count}",
            "lower eval.prompts or set eval.source",
        )
    return Subset(source, train, "train"), Subset(source, list(chosen.values()), "held-out")


def _key(row: Mapping[str, Any], prompt_key: str, where: str) -> bytes:
    """Digest of a row's prompt."""
    text = json.dumps(plain(prompt_key_text(row, prompt_key, where), where), sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
