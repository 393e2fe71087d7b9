"""`kvkeep import`: states that other programs have saved, and bundles of kvkeep, into the cache folder."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvkeep.store.errors import CapacityError, KvkeepError, StoreError, TooLarge, UnknownLayout, UsageError
from kvkeep.tools.console import make_console
from kvkeep.tools.folder import opened
from kvkeep.tools.import_report import Report, Result, document, show, show_end
from kvkeep.tools.options import dry_run_option, gguf_file, gguf_option, json_option, path_option, print_json, set_option
from kvkeep.tools.progress import bytes_progress
from kvkeep.tools.words import clean, plural, size

if TYPE_CHECKING:
    from kvkeep.cache.adapters.named_model import NamedModel
    from kvkeep.cache.foreign.item import Found, Tokens
    from kvkeep.cache.foreign.paths import Contents
    from kvkeep.cache.foreign.taking import Taker
    from kvkeep.cache.state import Form
    from kvkeep.store.repository import Repository

_EXIT_CODES = """\b
Exit codes, that of the first error, or of the one that ended it:
    0  everything is stored now, or was
    2  wrong usage, or a path that isn't there or can't be read
   3x  a bundle is damaged
   41  it is no state, or not one of this model with these settings
   42  a state ends too early or too late
   43  llama.cpp doesn't take it
   53  it is too large for the budget
others end the command before the rest is tried; see kvkeep --help
"""


# Bytes of a token in a bundle; tokens of a block, for the bar.
_TOKEN, _BLOCK = 4, 64


@click.command("import", epilog=_EXIT_CODES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@gguf_option
@set_option
@path_option
@click.option("--pin", is_flag=True, help="Pin what is imported: it is never evicted.")
@dry_run_option
@json_option
def import_(
    paths: tuple[str, ...], model: str | None, settings: tuple[str, ...], path: Path, pin: bool, dry_run: bool, as_json: bool
) -> None:
    """Take over states that other programs have saved.

    PATH is the folder of a LlamaDiskCache of llama-cpp-python, a file of llama.cpp (a slot of llama-server, or a session of
    --prompt-cache), a bundle of kvkeep export, or a folder of such files.

    Only bundles say whose states they are. For all others --model names the model, and --set each argument that your
    program passes to Llama. Whether the states fit that model is looked at: its layers, types and sizes, and llama.cpp has
    to take them if n_ctx has room. Whether the weights are the same can't be seen: for that your word is taken. The same
    holds for chats with images and contexts that were shifted, which must not be imported from a LlamaDiskCache or a slot.
    What can't be taken is named, and the rest goes on.
    """
    from kvkeep.cache.foreign.paths import contents

    if not all(paths):
        raise UsageError("PATH names a file or a folder; an empty text is none")
    if settings and model is None:
        raise UsageError("--set is about the model that --model names, and none is named")
    found = contents([Path(given).expanduser() for given in paths])
    if found.states and model is None:
        raise UsageError(f"{found.states[0].name} doesn't say whose state it is: --model FILE.gguf names the model")
    report = Report(path, dry_run, others=len(found.others))
    console = make_console(quiet=as_json)
    console.print(f"Cache folder: {path}", soft_wrap=True)
    work = _Import(report, console, pin)
    try:
        work.failed(found)
        if found.states or found.bundles:
            with _stores(path, model, settings, dry_run) as (named, repository):
                work.all(found, named, repository)
    except KeyboardInterrupt:
        show_end(console, report)
        raise
    show_end(console, report)
    if as_json:
        print_json(document(report))
    click.get_current_context().exit(report.exit_code)


@contextmanager
def _stores(
    path: Path, model: str | None, settings: tuple[str, ...], dry_run: bool
) -> "Iterator[tuple[NamedModel | None, Repository]]":
    """The model, if one is named, and the store. For a dry run all that must be written goes into one that doesn't stay."""
    with ExitStack() as stack:
        # First, because a model that can't be loaded shouldn't leave a folder behind.
        llm = None if model is None else _loaded(stack, gguf_file("--model", model), settings)
        repository = stack.enter_context(opened(path, create=not dry_run))
        scratch = repository
        if dry_run:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvkeep-"))
            scratch = stack.enter_context(opened(Path(folder), create=True))
        assert scratch is not None
        named = None
        if llm is not None:
            from kvkeep.cache.adapters.named_model import NamedModel

            named = NamedModel(llm, scratch)
        yield named, repository or scratch


def _loaded(stack: ExitStack, file: Path, settings: tuple[str, ...]) -> Any:
    from kvkeep.cache.adapters.loading import load_llama
    from kvkeep.cache.adapters.settings import llama_settings

    llm = load_llama(str(file), **llama_settings(settings))
    stack.callback(llm.close)
    return llm


class _Import:
    """The work, item by item."""

    def __init__(self, report: Report, console: Console, pin: bool) -> None:
        self._report = report
        self._console = console
        self._pin = pin
        self._done = 0
        self._total = 0
        self._needed = 0
        self._stored: list[tuple[Result, Tokens, Form]] = []

    def failed(self, found: "Contents") -> None:
        """Name what can't even be looked into."""
        for name, error in found.failed:
            with self._result(name, 0) as result:
                result.fail(error)

    def all(self, found: "Contents", model: "NamedModel | None", repository: "Repository") -> None:
        """Take everything, and look whether all of it is there in the end."""
        left: list[Found | Path] = [*found.states, *found.bundles]
        self._total = sum(state.n_bytes for state in found.states) + sum(map(_size_of, found.bundles))
        taker = _taker(model, repository, self._pin)
        try:
            while left:
                one = left.pop(0)
                if isinstance(one, Path):
                    self._bundle(one, model, repository)
                else:
                    assert taker is not None
                    self._state(one, taker)
        except _Ended:
            pass
        finally:
            self._report.not_tried = len(left)
        self._look_back(taker, repository)

    def _state(self, found: "Found", taker: "Taker") -> None:
        with self._result(found.name, found.n_bytes) as result, bytes_progress(clean(Path(found.name).name)) as progress:
            progress(self._done, self._total)
            try:
                checked = taker.read(found)
            except KvkeepError as error:
                result.fail(error)
                return
            result.tokens, result.is_new = len(checked.item.tokens), checked.is_new
            self._needed += checked.needed_bytes if checked.is_new else 0
            if self._report.dry_run:
                return
            blocks = 0

            def pause() -> None:
                nonlocal blocks
                blocks += 1
                # Some blocks are looked at twice, for a window or checkpoints.
                progress(self._done + min(found.n_bytes, blocks * _BLOCK * found.n_bytes // result.tokens), self._total)

            saved = self._written(result, lambda: taker.store(checked, pause))
            if saved is not None:
                result.written_bytes, result.evicted = saved.written_bytes, saved.evicted
                self._stored.append((result, checked.item.tokens, checked.item.form))

    def _bundle(self, path: Path, model: "NamedModel | None", repository: "Repository") -> None:
        from kvkeep.cache.bundle import Bundle

        n_bytes = _size_of(path)
        with self._result(str(path), n_bytes) as result, bytes_progress(clean(path.name)) as progress:
            # Each byte is read once to be verified, and once to be taken.
            read = 0

            def report(more: int) -> None:
                nonlocal read
                read += more
                progress(self._done + min(n_bytes, read // (1 if self._report.dry_run else 2)), self._total)

            try:
                with Bundle.open(path) as bundle:
                    _compare(bundle.fingerprint, clean(bundle.label), model)
                    bundle.verify(report)
                    result.tokens = sum(len(tokens) // _TOKEN for tokens in bundle.prefixes)
                    if self._report.dry_run:
                        needed = bundle.missing_bytes(repository)
                        result.is_new, self._needed = needed > 0, self._needed + needed
                        return
                    taken = self._written(result, lambda: bundle.take(repository, pin=self._pin, progress=report))
            except KvkeepError as error:
                result.fail(error)
                return
            if taken is not None:
                result.is_new = taken.new > 0
                result.tokens, result.written_bytes, result.evicted = taken.tokens, taken.written_bytes, taken.evicted

    def _written(self, result: Result, write: Any) -> Any:
        """What `write` returns. None if this one can't be stored.

        Raises:
            _Ended: nothing more can be stored, whatever it is.
        """
        try:
            return write()
        except KvkeepError as error:
            result.fail(error)
            if isinstance(error, (CapacityError, StoreError)) and not isinstance(error, TooLarge):
                self._report.ended_by = error.exit_code
                raise _Ended from error
            return None

    @contextmanager
    def _result(self, name: str, n_bytes: int) -> Iterator[Result]:
        """What becomes of one item, told when that is known."""
        result = Result(name, n_bytes)
        try:
            yield result
        except _Ended:
            self._tell(result)
            raise
        self._tell(result)

    def _tell(self, result: Result) -> None:
        self._done += result.n_bytes
        self._report.results.append(result)
        show(self._console, result, self._report.dry_run)

    def _look_back(self, taker: "Taker | None", repository: "Repository") -> None:
        if self._report.dry_run:
            self._foresee(repository)
        if taker is None:
            return
        for result, tokens, form in self._stored:
            result.gone = not taker.is_stored(tokens, form)
        if gone := sum(result.gone for result in self._report.results):
            self._report.warning = (
                f"{plural(gone, 'imported state')} had to go again, in whole or in part, for those that came after: the budget "
                "can't hold all. kvkeep budget --capacity gives more."
            )

    def _foresee(self, repository: "Repository") -> None:
        """What will be in the way of all together; of each alone is said with it."""
        from kvkeep.cache.budget import largest
        from kvkeep.store.space import Disk

        folder = next(folder for folder in (self._report.path, *self._report.path.parents) if folder.is_dir())
        if self._needed > (free := max(0, Disk.of(folder).room(None))):
            self._report.warning = (
                f"All together may take {size(self._needed)}, and the disk has {size(free)} besides what is left to others."
            )
        elif self._needed > (room := largest(repository.blobs)):
            self._report.warning = (
                f"All together may take {size(self._needed)}, and the budget leaves {size(room)}: some of it would have to go "
                "again. kvkeep budget --capacity gives more."
            )


class _Ended(Exception):
    """Nothing more can be stored. Why not is in the last result."""


def _size_of(path: Path) -> int:
    """For the bar only: whether it can be read shows when it is."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _taker(model: "NamedModel | None", repository: "Repository", pin: bool) -> "Taker | None":
    from kvkeep.cache.foreign.taking import Taker

    return None if model is None else Taker(model, repository, pin=pin)


def _compare(fingerprint: bytes, label: str, model: "NamedModel | None") -> None:
    if model is not None and fingerprint != model.identity.fingerprint:
        raise UnknownLayout(
            f"it holds states of {label}, fingerprint {fingerprint.hex()[:8]}; this model with these settings is "
            f"{clean(model.identity.label)}, {model.identity.fingerprint.hex()[:8]}"
        )
