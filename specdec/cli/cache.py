"""`specdec cache`: what is in the cache folder, and how to be rid of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from specdec.cache import KINDS, CacheEntry, cache_root, list_cache, remove_entry, select_entries
from specdec.eval.tables import align, format_bytes


@click.group("cache", short_help="List or clear what is kept on disk.", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> int | None:
    """List what is kept on disk ($SPECDEC_CACHE, else ~/.cache/specdec): compiled kernels, converted weights, measured costs, models.

    A time of last use is that of the last write on file systems that do not keep when a file was read.
    """
    if context.invoked_subcommand is not None:
        return None
    entries = list_cache()
    click.echo(f"{cache_root()}: {format_bytes(_total(entries))}")
    if entries:
        click.echo(f"\n{_table(entries)}")
    return 0


@command.command("clear", short_help="Remove what is kept on disk.")
@click.argument("words", nargs=-1, metavar="[KIND|NAME]...")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def clear(words: tuple[str, ...], yes: bool) -> int:
    """Remove what is kept on disk: the kinds (kernels, converted, costs, models) and names given, as `specdec cache` shows them.

    Without any, all that specdec makes or fetches again by itself, and what killed writers left behind; models that
    were put there by hand stay unless they are named. Nothing outside the cache folder is touched.
    """
    entries = list_cache()
    chosen = select_entries(entries, words)
    kept = [] if words else [entry for entry in entries if entry not in chosen]
    if chosen:
        click.echo(f"{_table(chosen)}\n")
        try:
            sure = yes or click.confirm(f"Remove {_count(chosen)} from {cache_root()}?")
        except click.Abort:  # also where there is nobody to ask
            click.echo("\nnothing was removed; --yes does not ask", err=True)
            return 1
        if not sure:
            click.echo("nothing was removed")
            return 1
    freed = sum(remove_entry(entry) for entry in chosen)
    click.echo(f"freed {format_bytes(freed)}" if chosen else "nothing to remove")
    if kept:
        click.echo(f"kept {_count(kept)} that specdec did not fetch; `specdec cache clear models` removes them too")
    return 0


def _table(entries: Sequence[CacheEntry]) -> str:
    """One line per entry, and a line per kind with its total where there are several entries of it."""
    lines = [["kind", "name", "size", "last use", "made from"]]
    for entry in entries:
        origin = "unfinished" if entry.partial else entry.source
        lines.append([entry.kind, entry.name, format_bytes(entry.size_bytes), _day(entry.last_use_s), origin])
    for kind in KINDS:
        own = [entry for entry in entries if entry.kind == kind]
        if len(own) > 1:
            lines.append([kind, f"all {len(own)}", format_bytes(_total(own)), "", ""])
    return align(lines, left=(0, 1, 4))


def _count(entries: Sequence[CacheEntry]) -> str:
    return f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'} ({format_bytes(_total(entries))})"


def _total(entries: Sequence[CacheEntry]) -> int:
    return sum(entry.size_bytes for entry in entries)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
