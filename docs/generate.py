"""Writes docs/reference/*.md, and the key tables of docs/howto/migrate_from_*.md, from the code: `make docs`.

Tests compare the files with what this makes.
"""

from __future__ import annotations

from pathlib import Path

from docklands.config.convert.files import SYSTEMS
from docklands.config.convert.page import with_table
from docklands.config.reference import render_config_markdown, render_errors_markdown
from docklands.obs.reference import render_metrics_markdown

PAGES = {
    "config.md": render_config_markdown,
    "errors.md": render_errors_markdown,
    "metrics.md": render_metrics_markdown,
}


def main() -> None:
    """Write every page."""
    folder = Path(__file__).parent / "reference"
    folder.mkdir(exist_ok=True)
    for name, render in PAGES.items():
        (folder / name).write_text(render(), encoding="utf-8")
        print(folder.name, name)
    for name, system in SYSTEMS.items():
        page = folder.parent / "howto" / f"migrate_from_{name}.md"
        page.write_text(with_table(page.read_text(encoding="utf-8"), system), encoding="utf-8")
        print("howto", page.name)


if __name__ == "__main__":
    main()
