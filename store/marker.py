"""A file that is there while a root is open: who finds it alone knows that its last user died, and looks more closely.

missing       the last user closed properly
empty         it was killed; LMDB's file is examined, and names are compared
not empty     somebody met damage; the index is examined, too
"""

import os
from contextlib import suppress
from enum import Enum
from pathlib import Path

from kvkeep.store.private import make_private_file, sync_folder

NAME = "in-use"


class Ending(Enum):
    """How the last use of a root ended."""

    CLEAN = "clean"
    KILLED = "killed"
    DAMAGED = "damaged"


class Marker:
    """The marker of one root. Whoever sets it holds the root's lock, shared; whoever clears it, alone."""

    def __init__(self, root: Path) -> None:
        self.path = root / NAME

    def read(self) -> Ending:
        """What it says about the last use."""
        try:
            return Ending.DAMAGED if self.path.stat().st_size else Ending.KILLED
        except FileNotFoundError:
            return Ending.CLEAN

    def set(self) -> None:
        """The root is in use from now on. Durable, because a power cut kills as well."""
        if not self.path.exists():
            make_private_file(self.path)
            sync_folder(self.path.parent)

    def report(self, sentence: str) -> None:
        """Damage was met: whoever opens the root alone next looks at everything."""
        # A disk that is full, or a folder that is gone, must not turn one error into another.
        with suppress(OSError):
            self.set()
            self.path.write_text(sentence[:1000] + "\n", "utf-8")

    def mended(self) -> None:
        """What was reported is mended, and the root is still in use."""
        if self.read() is Ending.DAMAGED:
            os.truncate(self.path, 0)

    def clear(self) -> None:
        """The last user leaves. What was reported stays for the next one."""
        if self.read() is Ending.KILLED:
            self.path.unlink(missing_ok=True)
