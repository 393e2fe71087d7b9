"""Where text for people goes: colours and live text in a terminal, plain lines everywhere else."""

import io
import sys

from rich.console import Console

# A pipe has no width. Wide enough that no table is folded, because nobody reads the far end of a padded line there.
_PIPE_WIDTH = 160


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
