"""``memfit``: the command line. One file per command; a command's help is its docstring."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import typer

import memfit.cli

_NO_COMMANDS = {"main", "options"}


def make_app() -> typer.Typer:
    """The application with every command of this folder (a module's ``command`` function)."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                      help="Predict, plan, run and verify deep-learning jobs inside the memory that you have.")  # fmt: skip
    for info in sorted(pkgutil.iter_modules(memfit.cli.__path__), key=lambda i: i.name):
        if info.name not in _NO_COMMANDS:
            module = importlib.import_module(f"memfit.cli.{info.name}")
            app.command(info.name.replace("_", "-"))(module.command)
    app.callback()(_common)
    return app


def _common(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(memfit.__version__)
        raise typer.Exit


def main() -> None:
    """Runs the command line; every error of memfit's own becomes one message and its exit status."""
    from memfit.core.errors import MemfitError

    try:
        code = make_app()(standalone_mode=False)
    except MemfitError as error:
        print(f"memfit: {error}", file=sys.stderr)
        code = error.exit_status
    except (KeyboardInterrupt, EOFError):
        code = 130
    except BrokenPipeError:  # the reader (`| head`) went away; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        code = _usage(error)
    sys.exit(code or 0)


def _usage(error: Exception) -> int:
    """Typer's own errors (a wrong option) print themselves; anything else is a mistake in memfit."""
    show = getattr(error, "show", None)
    if show is None:
        raise error
    show()
    return 2
