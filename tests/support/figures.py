"""What a bench hands back: one number, what it should be, and how it came about."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AtMost:
    """A target that larger values miss."""

    limit: float

    def met(self, value: float) -> bool:
        return value <= self.limit

    def __str__(self) -> str:
        return f"<= {self.limit:g}"


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A target that smaller values miss."""

    limit: float

    def met(self, value: float) -> bool:
        return value >= self.limit

    def __str__(self) -> str:
        return f">= {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        name: what was measured.
        value: the number; times are ratios inside one run, because absolute ones say more about the machine.
        unit: of the value, "x" for ratios.
        target: what it should be; None for a number that only explains another.
        detail: what it was made of, for people.
    """

    name: str
    value: float
    unit: str
    target: AtMost | AtLeast | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met, None if there is none."""
        return None if self.target is None else self.target.met(self.value)

    def as_json(self) -> dict[str, object]:
        target = None if self.target is None else str(self.target)
        fields = {"name": self.name, "value": self.value, "unit": self.unit, "target": target, "met": self.met}
        return fields | {"detail": self.detail}


@dataclass(frozen=True, slots=True)
class Run:
    """What every bench is given.

    Attributes:
        quick: fewer repetitions, to see that a bench works; its figures are noisy.
        folder: an empty folder of the bench's own.
        say: tells the person what is going on.
    """

    quick: bool
    folder: Path
    say: Callable[[str], None]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The ratio of medians of two series that were measured alternately."""
    return statistics.median(ours) / statistics.median(theirs)


def ms(seconds: Sequence[float]) -> str:
    """Median and range of some times, in milliseconds."""
    low, middle, high = (1e3 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.1f} ms ({low:.1f} to {high:.1f})"


def disk_bytes(folder: Path) -> int:
    """Bytes that a folder really occupies; sparse files are longer than that."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
