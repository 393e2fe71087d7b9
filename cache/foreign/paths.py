"""Which kind of thing a path is: by its content, never by its name."""

from dataclasses import dataclass, field
from pathlib import Path

from kvkeep.cache.bundle import is_bundle
from kvkeep.cache.foreign import llama_files, stock_folder
from kvkeep.cache.foreign.item import Found, reading
from kvkeep.store.errors import KvkeepError, UnknownLayout, UsageError


@dataclass(slots=True)
class Contents:
    """What paths hold.

    Attributes:
        states: saved states, the largest first: what shorter ones hold is then stored already, and in whole blocks.
        bundles: bundles of kvkeep.
        failed: paths that hold nothing that can be read, and why not.
        others: files in folders that are something else.
    """

    states: list[Found] = field(default_factory=list)
    bundles: list[Path] = field(default_factory=list)
    failed: list[tuple[str, KvkeepError]] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)


def contents(paths: list[Path]) -> Contents:
    """Look at paths: folders of a `LlamaDiskCache`, state files, bundles, or folders of such files."""
    found = Contents()
    for path in dict.fromkeys(paths):
        try:
            _look(path, found)
        except KvkeepError as error:
            found.failed.append((str(path), error))
    found.states.sort(key=lambda state: -state.n_bytes)
    return found


def _look(path: Path, found: Contents) -> None:
    with reading(path):
        if not path.is_dir():
            if not _take(path, found):
                raise UnknownLayout(
                    f"{path} is no state that can be imported: a folder of a LlamaDiskCache, a saved sequence or session of "
                    "llama.cpp, or a bundle of kvkeep is expected"
                )
        elif stock_folder.is_stock_folder(path):
            found.states += stock_folder.found_in(path)
        else:
            _look_into(path, found)


def _look_into(folder: Path, found: Contents) -> None:
    """The files of a folder; no folder in it."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    others = []
    for path in files:
        try:
            if not _take(path, found):
                others.append(path)
        except KvkeepError as error:
            found.failed.append((str(path), error))
    if len(others) == len(files):
        raise UsageError(
            f"{folder} holds nothing to import: neither {stock_folder.DATABASE} of a LlamaDiskCache, nor state files"
        )
    found.others += others


def _take(path: Path, found: Contents) -> bool:
    if llama_files.is_llama_file(path):
        found.states.append(llama_files.found_at(path))
    elif is_bundle(path):
        found.bundles.append(path)
    else:
        return False
    return True
