"""What is done one after the other, each in a process of its own, in a folder of its own."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.tools.children import run_child


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to measure.

    Attributes:
        text: what is measured, for people.
        do: measures it.
    """

    text: str
    do: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Given:
    """What a measurement with a model is given.

    Attributes:
        model: a GGUF file.
        settings: for `Llama`.
        folder: for temporary folders.
    """

    model: str
    settings: dict[str, Any]
    folder: Path

    def run(self, job: str, **arguments: Any) -> dict[str, Any]:
        """Do a job with the model in a new process."""
        return run(job, model=self.model, settings=self.settings, **arguments)


def run(job: str, **arguments: Any) -> dict[str, Any]:
    """Do a job of `kvkeep.tools.bench.child` in a new process.

    Raises:
        ChildFailed: it didn't end well.
    """
    return run_child("kvkeep.tools.bench.child", "the bench's", {"job": job, **arguments}, lambda _event: None)


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """An empty folder that is gone at the end."""
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
