"""The identity of a model in a context: which states may stand in for each other.

Two contexts share states only if every ingredient is the same. What changes the keys and values is in; what only
changes how fast or in what batches they are computed is out. docs/DESIGN.md has the table with the reasons.
"""

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvkeep.cache.priority import run_idle
from kvkeep.store import digests
from kvkeep.store.digests import FileStamp
from kvkeep.store.errors import KvkeepError, NotIdentified
from kvkeep.store.hashing import Fingerprint, digest_fields, digest_file
from kvkeep.store.repository import Repository

# Written into every namespace: another text here makes every stored state unreachable.
PURPOSE = "kvkeep 2026-11 fingerprint of a model in a context"

# Files of up to this size together are hashed while the caller waits: a quarter of a second at BLAKE3's 4 GB/s, out of
# a page cache that llama.cpp has just filled. Larger ones are hashed behind, so that loading stays as quick as before.
HASH_AT_ONCE_BYTES = 1 << 30

_SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What goes into a fingerprint.

    Attributes:
        fields: settings by name, in words; order doesn't matter.
        files: weights and adapters, in the order in which they are applied; their content counts, not their names.
    """

    fields: dict[str, str]
    files: tuple[str, ...]


def model_files(path: str) -> tuple[str, ...]:
    """All parts of a GGUF that may be split as `name-00001-of-00003.gguf`, else the file itself."""
    match = _SPLIT.fullmatch(path)
    parts = 0 if match is None else int(match["parts"])
    if match is None or parts == 0:
        return (path,)
    return tuple(f"{match['stem']}-{part:05d}-of-{parts:05d}.gguf" for part in range(1, parts + 1))


def combine(ingredients: Ingredients, file_digests: Sequence[bytes]) -> Fingerprint:
    """The fingerprint of settings and file contents."""
    files = [(f"file {i}", digest) for i, digest in enumerate(file_digests)]
    return Fingerprint(digest_fields(PURPOSE, [*sorted(ingredients.fields.items()), *files]))


class Identification:
    """A fingerprint that may still be in the making.

    Args:
        ingredients: what goes into it.
        repository: where digests of large files are remembered.
        ready: called with the fingerprint once it is known, from whichever thread found it.
        failed: called with the error if a file or the repository can't be read.
    """

    def __init__(
        self,
        ingredients: Ingredients,
        repository: Repository,
        ready: Callable[[Fingerprint], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._ingredients = ingredients
        self._repository = repository
        self._ready = ready
        self._failed = failed
        self._stamps: list[FileStamp] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Identify now if that is quick, else behind."""
        try:
            # Taken before anything is read: what counts is the file that llama.cpp has loaded, not one that replaces it
            # while it is hashed.
            self._stamps = [FileStamp.of(path) for path in self._ingredients.files]
            at_once = self._unknown_bytes() <= HASH_AT_ONCE_BYTES
        except (OSError, KvkeepError) as error:
            self._failed(error)
            return
        if at_once:
            self._run()
            return
        self._thread = threading.Thread(target=run_idle, args=(self._run,), name="kvkeep-identify", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give up. What was hashed so far is lost."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def wait(self, timeout: float | None = None) -> None:
        """Until it is known or has failed, or `timeout` seconds are over."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _unknown_bytes(self) -> int:
        with self._repository.rows() as connection:
            return sum(0 if digests.get(connection, stamp) else stamp.size for stamp in self._stamps)

    def _run(self) -> None:
        try:
            found = [self._digest(*file) for file in zip(self._ingredients.files, self._stamps, strict=True)]
            self._ready(combine(self._ingredients, found))
        except _Stopped:
            return
        except Exception as error:  # noqa: BLE001 - in a thread of its own an error would be lost, and the cache wait forever
            self._failed(error)

    def _digest(self, path: str, stamp: FileStamp) -> bytes:
        """Digest of a file, from memory if its stamp is the same, else read.

        Raises:
            NotIdentified: another file has taken its place meanwhile.
        """
        with self._repository.rows() as connection:
            known = digests.get(connection, stamp)
        if known is not None:
            return known
        # One thread behind: helpers of BLAKE3 would inherit the idle priority for good.
        digest = digest_file(path, progress=self._check_stop, in_parallel=self._thread is None)
        if FileStamp.of(path) != stamp:
            raise NotIdentified(f"{path} was replaced or changed after it was loaded: load the model again")
        # Not remembered, it is only hashed again at the next start.
        with suppress(KvkeepError), self._repository.index.write() as connection:
            digests.put(connection, stamp, digest)
        return digest

    def _check_stop(self, _: int) -> None:
        if self._stop.is_set():
            raise _Stopped


class _Stopped(Exception):
    """The identification was told to stop."""
