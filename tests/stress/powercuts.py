"""The power is cut before any operation: is everything there that was flushed, and does the next open go on?

Each life of a root (tests/support/lives.py) is written down, operation by operation. From that `powerloss.image` builds what
the disk may hold after a cut, and each image is looked at as after a kill. To build one again that a violation names:
`powerloss.image(whole.root, faults.operations(whole.log), n, variant, target)`, where `whole` is that of `kills.whole_life`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from shutil import rmtree

import faults
import kills
import lives
import powerloss
from faults import Forks
from figures import AtLeast, AtMost, Figure, Run
from kills import Whole
from powerloss import VARIANTS


def measure(run: Run) -> list[Figure]:
    with kills.workers(__file__) as in_parallel:
        wholes = kills.whole_lives(in_parallel, run.folder, list(lives.SCENARIOS))
        cuts = list(_quick(wholes) if run.quick else _long(wholes))
        run.say(f"{len(cuts)} images")
        seen = in_parallel(lambda forks, task: _after(forks, run.folder, *task), list(enumerate(cuts)))
    missing = [one.missing for one in seen if one.missing]
    n_operations = sum(whole.n_operations for whole in wholes.values())
    detail = f"{len(wholes)} scenarios with {n_operations} operations; variants: {', '.join(VARIANTS)} and random ones"
    return [
        Figure("images of a disk after a power cut", len(seen), "", AtLeast(60 if run.quick else 3000), detail),
        Figure("flushed and missing", len(missing), "", AtMost(0), " | ".join(missing[:5])),
        kills.violations([one.complaint for one in seen]),
    ]


@dataclass(frozen=True)
class _Cut:
    """A power cut right before operation `n` of a life, and what of the pending writes has reached the disk."""

    whole: Whole
    scenario: str
    n: int
    variant: str | int

    def at_least(self) -> list[int]:
        """How many of each chat's first tokens must be there."""
        return self.whole.surely_there(max(i for i, said in enumerate(self.whole.said) if i == 0 or said.after < self.n))


@dataclass(frozen=True)
class _Seen:
    """What is wrong with an image: something flushed isn't there, or anything else."""

    missing: str = ""
    complaint: str = ""


def _long(wholes: dict[str, Whole]) -> Iterator[_Cut]:
    """Every operation, and several times where there are few. Neighbours have other variants."""
    for scenario, whole in wholes.items():
        for first in range(min(8, max(1, 400 // whole.n_operations))):
            for n in range(1, whole.n_operations + 2):
                yield _Cut(whole, scenario, n, _variant(n + first, seed=first))


def _variant(number: int, seed: int) -> str | int:
    every = (*VARIANTS, 2 * seed, 2 * seed + 1)
    return every[number % len(every)]


def _quick(wholes: dict[str, Whole]) -> Iterator[_Cut]:
    random = Random(2)
    variants: Iterator[str | int] = cycle((*VARIANTS, 1, 2))
    for scenario, whole in wholes.items():
        for _ in range(7):
            yield _Cut(whole, scenario, random.randint(1, whole.n_operations + 1), next(variants))


def _after(forks: Forks, folder: Path, number: int, cut: _Cut) -> _Seen:
    root = folder / f"cut {number}"
    root.mkdir()
    try:
        log, before = str(cut.whole.log), str(cut.whole.root)
        found, complaint = kills.looked(forks.run("look at image", root, before=before, log=log, n=cut.n, variant=cut.variant))
    finally:
        rmtree(root)
    what = f"{cut.scenario}, cut before operation {cut.n}, variant {cut.variant!r}: "
    if complaint:
        return _Seen(complaint=what + complaint)
    missing = kills.missing(found, cut.at_least())
    return _Seen(missing=missing and what + missing)


def look_at_image(root: Path, before: str, log: str, n: int, variant: str | int) -> None:
    """`kills.look` at what a power cut leaves, which is built in a folder of this root."""
    image = root / "image"
    powerloss.image(Path(before), faults.operations(Path(log)), n, variant, image)
    kills.look(image)


if __name__ == "__main__":
    faults.serve(lives.JOBS | {"look": kills.look, "look at image": look_at_image})
