"""The `specdec` command. One module per command, imported when it is named; nothing here imports torch."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import click
from click.exceptions import NoArgsIsHelpError

from specdec import __version__
from specdec.errors import SpecdecError


class LazyGroup(click.Group):
    """A group whose commands are modules: `name` is `command` in `package.name`.

    Args:
        package: where the command modules live.
        modules: command names, in the order that `--help` lists them.
    """

    def __init__(self, package: str, modules: Sequence[str], **attrs: object) -> None:
        super().__init__(**attrs)  # type: ignore[arg-type]  # click's own keyword arguments, passed on
        self.package = package
        self.modules = tuple(modules)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        command = importlib.import_module(f"{self.package}.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.modules and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.modules, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Commands: {', '.join(self.modules)}."
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"specdec {__version__}")
        ctx.exit()


@click.command(
    cls=LazyGroup,
    package="specdec.cli",
    modules=["generate", "serve", "eval", "bench", "simulate", "cache"],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version and exit.")
def cli() -> None:
    """LLM inference built around speculative decoding: the same output, sooner."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0, 1 where a command found what it looked for amiss, 2 for errors, 130 when interrupted."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. Errors are one line on stderr."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for `--drafter module:name`: a script's path holds its own folder instead
    try:
        status = cli.main(list(sys.argv[1:] if argv is None else argv), prog_name="specdec", standalone_mode=False)
    except NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "specdec"
        return _fail(f"{error.format_message()} Try '{path} --help'.")
    except click.ClickException as error:
        return _fail(error.format_message())
    except SpecdecError as error:
        return _fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        click.echo("specdec: interrupted", err=True)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; keep the interpreter's own farewell about it quiet
        return 141
    return status if isinstance(status, int) else 0


def _fail(message: str) -> int:
    click.echo(f"specdec: error: {' '.join(message.split())}", err=True)
    return 2
