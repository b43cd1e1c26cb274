"""The `quire` command."""

from services.cli.main import main

__all__ = ["main"]
