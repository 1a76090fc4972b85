"""Writing a Hugging Face directory atomically: everything into a temporary directory beside it, then one rename."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from docklands.errors import CheckpointError

MAX_SHARD_BYTES = 5_000_000_000

COMPANIONS = (
    "char_tokenizer.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def write_directory(
    path: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    source: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    texts: dict[str, str] | None = None,
) -> None:
    """Write config.json, the tensors, companion files of `source` and `texts` (file name -> content).

    max_shard_bytes  of a file, and so of the tensors that are held until it is written; one larger tensor has its own

    An existing directory is replaced only once the new one is complete.
    CheckpointError when something cannot be written; nothing is left behind then.
    """
    with whole(path) as scratch:
        _write_tensors(scratch, tensors, max_shard_bytes)
        _write_text(scratch / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in COMPANIONS if source is not None else ():
            if (source / name).is_file():  # type: ignore[operator]
                shutil.copyfile(source / name, scratch / name)  # type: ignore[operator]
        for name, text in (texts or {}).items():
            _write_text(scratch / name, text)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A directory to write into, which takes the place of `path` when this is left without an error. CheckpointError
    when something cannot be written; nothing is left behind then.
    """
    scratch: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        scratch.chmod(0o755)
        yield scratch
        for file in scratch.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner only
            _sync(file)
        _sync(scratch)
        _replace(scratch, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"model directory {path} cannot be written: {error}", "free space or choose another"
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > max_shard_bytes:
            shards.append(_write_shard(directory, len(shards), held))
            held, size = {}, 0
        held[name] = _own(tensor.cpu().contiguous())
        size += tensor.nbytes
        total += tensor.nbytes
        del tensor  # with it, the parameter that it may be a view of
    shards.append(_write_shard(directory, len(shards), held))
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{i}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_text(directory / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_shard(directory: Path, number: int, held: dict[str, Tensor]) -> list[str]:
    save_file(held, directory / f"shard-{number}", metadata={"format": "pt"})
    return list(held)


def _own(tensor: Tensor) -> Tensor:
    """A view into a fused parameter gets a storage of its own: safetensors refuses shared ones, and the parameter need
    not be held until its parts are written.
    """
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(scratch: Path, path: Path) -> None:
    """Put `scratch` at `path`. A directory there is moved aside first and deleted last."""
    if not path.exists():
        scratch.rename(path)
    else:
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
        path.rename(aside / path.name)
        try:
            scratch.rename(path)
        except OSError:
            (aside / path.name).rename(path)
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    _sync(path.parent)
