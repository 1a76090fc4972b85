"""Where the command begins: Ctrl-C while everything else is imported ends it as it does later."""

from __future__ import annotations

import sys


def main() -> None:
    """See docklands.cli.main.main."""
    try:
        from docklands.cli.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()
