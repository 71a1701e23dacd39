"""Progress of a command on stderr."""

from __future__ import annotations

import sys

import click


class StatusLine:
    """One line that is overwritten on a terminal, a line per drafter elsewhere."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        click.echo(text, err=True)

    def show(self, text: str) -> None:
        """A line that the next one overwrites; only on a terminal."""
        if self.terminal:
            click.echo(f"\r\033[K{text}", nl=False, err=True)

    def progress(self, drafter: str, done: int, total: int) -> None:
        """How many requests of a drafter are done."""
        self.show(f"{drafter}: {done} of {total} requests")
        if done == total and not self.terminal:
            click.echo(f"{drafter}: {total} requests done", err=True)

    def clear(self) -> None:
        """Takes away what `show` left."""
        self.show("")
