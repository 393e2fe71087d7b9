"""Where text for people goes: colours and live text in a terminal, plain lines everywhere else."""

import io
import sys

import click
from rich.console import Console

from kvkeep.store.errors import UsageError

# A pipe has no width. Wide enough that no table is folded, because nobody reads the far end of a padded line there.
_PIPE_WIDTH = 160


def confirm(question: str, otherwise: str) -> None:
    """Go on only if a person says so.

    Args:
        question: what is asked.
        otherwise: why `--yes` is needed where nobody can be asked.

    Raises:
        UsageError: nobody can be asked.
        click.Abort: the person says no.
    """
    if not can_ask():
        raise UsageError(f"--yes is needed where nobody can be asked: {otherwise}")
    click.confirm(question, abort=True, err=True)


def can_ask() -> bool:
    """Whether there is a person at a terminal."""
    return sys.stdin.isatty()


def make_console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """A console that neither guesses at colours in plain sentences nor reads brackets in them as markup.

    Args:
        quiet: print nothing at all.
        stderr: write there.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        # Model names and answers may hold anything; a terminal of another encoding must not end the command.
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(quiet=quiet, stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
