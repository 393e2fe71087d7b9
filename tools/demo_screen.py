"""What the demo shows while it runs, live in a terminal and as plain lines elsewhere, and the table at its end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvkeep.tools.demo_chat import Result
from kvkeep.tools.demo_process import Event
from kvkeep.tools.demo_prompt import WANTED_TOKENS
from kvkeep.tools.words import duration, ratio, size

_INDENT = 3


class _Answer:
    """What has come of the answer so far; until then a spinner with a clock. Rich asks for it again and again."""

    def __init__(self) -> None:
        self._spinner = Spinner("dots")
        self.began = time.monotonic()
        self.doing = "loading the model"
        self.text = ""

    def __rich__(self) -> Padding:
        if self.text:
            return Padding(Text(self.text, style="cyan"), (0, 0, 0, _INDENT))
        self._spinner.update(text=f"{self.doing} ... {time.monotonic() - self.began:.0f} s")
        return Padding(self._spinner, (0, 0, 0, _INDENT))


class Screen:
    """Writes to a console; a quiet one shows nothing.

    Args:
        console: where to.
        n_ctx: the context that was asked for, to say why a prompt was shortened.
    """

    def __init__(self, console: Console, n_ctx: int) -> None:
        self._console = console
        self._n_ctx = n_ctx
        self._introduced = False

    def say(self, text: str = "", style: str = "", indent: int = 0) -> None:
        """One paragraph, folded in a terminal, one line elsewhere."""
        if self._console.is_terminal:
            self._console.print(Padding(Text(text, style=style), (0, 0, 0, indent)))
        else:
            self.line(" " * indent + text)

    def line(self, text: str) -> None:
        """A line that is never folded, so that a path or command in it can be copied."""
        self._console.print(text, soft_wrap=True)

    @contextmanager
    def process(self, title: str, question: str) -> Iterator[Callable[[Event], None]]:
        """Show one process. The block gets what is to be called with each of its events."""
        self.say()
        self.say(title, style="bold")
        self.say(f"> {question}", indent=_INDENT)
        if not self._console.is_terminal:
            yield self._plainly
            return
        answer = _Answer()
        with Live(answer, console=self._console, refresh_per_second=12) as live:
            yield lambda event: self._lively(event, answer, live)

    def _lively(self, event: Event, answer: _Answer, live: Live) -> None:
        if event["event"] == "loaded":
            self._introduce(event)
            answer.doing, answer.began = "reading the prompt", time.monotonic()
        else:
            answer.text += event["text"]
        live.refresh()

    def _plainly(self, event: Event) -> None:
        if event["event"] == "loaded":
            self._introduce(event)
            self._console.print(" " * _INDENT, end="")
        else:
            text = event["text"].replace("\n", "\n" + " " * _INDENT)
            self._console.print(text, end="", soft_wrap=True)

    def _introduce(self, event: Event) -> None:
        """Once, because only a process that has loaded the model knows how many tokens the prompt has for it."""
        if self._introduced:
            return
        self._introduced = True
        tokens, room = event["system_tokens"], event["n_context"]
        self.say(f"({event['label'] or 'The model'}; system prompt and tools: {tokens:,} tokens)", indent=_INDENT)
        if event["shrunk"]:
            whose = "the model" if room < self._n_ctx else "--n-ctx"
            why = f"{whose} allows a context of {room:,} tokens"
            self.say(f"(The system prompt is shortened from about {WANTED_TOKENS:,} tokens, because {why}.)", indent=_INDENT)

    def result(self, result: Result) -> None:
        """The figures below an answer."""
        if not self._console.is_terminal:
            self.say()
        self.say(
            f"{result.prompt_tokens:,} tokens in the prompt, {result.decoded:,} decoded; "
            f"first text after {duration(result.first_text_seconds)}.",
            style="bold",
            indent=_INDENT,
        )
        if result.cache:
            stored = f"; stored {size(result.stored_bytes)} behind the answer" if result.stored_bytes else ""
            self.say(f"kvkeep: {result.cache}{stored}.", style="green", indent=_INDENT)

    def summary(self, kept: tuple[Result, Result], cold: tuple[Result, Result]) -> None:
        """First start and restart, with kvkeep and without."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("")
        for header in ("first text\nwith kvkeep", "\nwithout", "\nratio"):
            table.add_column(header, justify="right")
        for header in ("tokens decoded\nwith kvkeep", "\nwithout", "\nratio"):
            table.add_column(header, justify="right")
        for name, ours, theirs in zip(("First start", "After a restart"), kept, cold, strict=True):
            table.add_row(
                name,
                duration(ours.first_text_seconds),
                duration(theirs.first_text_seconds),
                ratio(theirs.first_text_seconds, ours.first_text_seconds),
                f"{ours.decoded:,}",
                f"{theirs.decoded:,}",
                ratio(theirs.decoded, ours.decoded),
            )
        self.say()
        self._console.print(table)
        self.say()
