"""Floor 8: the `docklands` command."""
