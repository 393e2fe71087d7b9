"""How far a long piece of work is: a bar with bytes and time on stderr in a terminal, nothing elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvkeep.tools.console import make_console

Report = Callable[[int, int], None]
"""Called with the bytes that are done, and all that there are."""


@contextmanager
def bytes_progress(what: str) -> Iterator[Report]:
    """Show progress for as long as the block runs.

    Args:
        what: what is being done, such as `Reading`.
    """
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def count_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same for things that are counted; what is yielded is called with how many more are done.

    Args:
        what: what is being done, such as `Decoding`.
        total: how many there are.
    """
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda more: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)
