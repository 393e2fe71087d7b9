"""Killed at every named step, at operations on files, and at any moment: does the next open find what was flushed, and go on?

Lives of a root (tests/support/lives.py) end by SIGKILL. Then the root is opened in another process: whatever was flushed is
there, every state is right, nothing is left over, and the next save works.

To do one kill again that a violation names: `killed(forks, folder, 0, at_operation(scenario, whole, n, torn=False))`, where
`whole` is that of `whole_life`, as in tests/faults/test_kills.py.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random
from shutil import rmtree
from typing import Any, TypeAlias, TypeVar

import faults
import lives
import powerloss
from faults import Forks
from figures import AtLeast, AtMost, Figure, Run

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.check import Trouble, check
from kvkeep.store.engine import SUFFIXES
from kvkeep.store.marker import Marker
from kvkeep.store.opening import INDEX_FILE
from kvkeep.store.steps import Step

_WORKERS = 2

_Task = TypeVar("_Task")
_Done = TypeVar("_Done")
Child: TypeAlias = "subprocess.CompletedProcess[str]"


def measure(run: Run) -> list[Figure]:
    with workers(__file__) as in_parallel:
        wholes = whole_lives(in_parallel, run.folder, list(lives.SCENARIOS))
        tasks = list(_quick(wholes) if run.quick else _long(wholes))
        run.say(f"{len(tasks)} kills")
        complaints = in_parallel(lambda forks, task: killed(forks, run.folder, *task), list(enumerate(tasks)))
    met = {task.step for task in tasks if task.step}
    not_met = [step.value for step in Step if step.value not in met]
    by_how = {how: sum(task.how == how for task in tasks) for how in ("step", "operation", "moment")}
    detail = "tried: " + ", ".join(f"{count} at some {how}" for how, count in by_how.items())
    # Who is killed at a random moment may have come to its end before.
    made, surely = sum(complaint is not None for complaint in complaints), len(tasks) - by_how["moment"]
    return [
        Figure("processes killed", made, "", AtLeast(surely if run.quick else 1000), f"{detail}; {len(wholes)} scenarios"),
        Figure(
            "named steps at which they were", len(met), "", AtLeast(len(Step)), "not met: " + (", ".join(not_met) or "none")
        ),
        violations(complaints),
    ]


def violations(complaints: Sequence[str | None]) -> Figure:
    """How many of these say something."""
    found = [complaint for complaint in complaints if complaint]
    return Figure("violations", len(found), "", AtMost(0), " | ".join(found[:5]))


@contextmanager
def workers(file: str) -> Iterator[Callable[[Callable[[Forks, _Task], _Done], Sequence[_Task]], list[_Done]]]:
    """Does something with each of many tasks, as many at a time as there are `Forks` of this file."""
    all_forks = [Forks(file) for _ in range(_WORKERS)]
    idle: SimpleQueue[Forks] = SimpleQueue()
    for forks in all_forks:
        idle.put(forks)

    def with_one(do: Callable[[Forks, _Task], _Done], task: _Task) -> _Done:
        forks = idle.get()
        try:
            return do(forks, task)
        finally:
            idle.put(forks)

    try:
        with ThreadPoolExecutor(_WORKERS) as pool:
            yield lambda do, tasks: list(pool.map(lambda task: with_one(do, task), tasks))
    finally:
        for forks in all_forks:
            forks.close()


# -- what a life does when nothing ends it -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """What a life says when a step of it is done.

    Attributes:
        after: number of the last operation by then, which counts for power cuts.
        there: how many of each chat's first tokens are there.
    """

    after: int
    there: list[int]


def announced(first: Said, stdout: str) -> list[Said]:
    """What a life has said, from its beginning on. A line that a kill has cut off counts as not said."""
    lines = [json.loads(line) for line in stdout.split("\n")[:-1]]
    # The last line of one that came to its end is about something else.
    return [first, *(Said(*line) for line in lines if isinstance(line[0], int))]


@dataclass(frozen=True)
class Whole:
    """A life that came to its end.

    Attributes:
        root: a copy of its root at the beginning.
        log: its journal.
        said: what was there at the beginning and after each step.
        steps: the named steps that it came by.
        n_operations: how many operations it did.
        seconds: how long it took.
    """

    root: Path
    log: Path
    said: list[Said]
    steps: list[str]
    n_operations: int
    seconds: float

    def surely_there(self, n_steps: int) -> list[int]:
        """Of each chat, what an end in the step after the first `n_steps` can't take away: what that step would leave."""
        near = [step.there for step in self.said[n_steps : n_steps + 2]]
        return [min(lengths) for lengths in zip(*near, strict=True)]


def whole_lives(
    in_parallel: Callable[[Callable[[Forks, str], Whole], Sequence[str]], list[Whole]], folder: Path, scenarios: list[str]
) -> dict[str, Whole]:
    """All of these scenarios, each from its beginning to its end."""
    return dict(zip(scenarios, in_parallel(lambda forks, name: whole_life(forks, folder, name), scenarios), strict=True))


def whole_life(forks: Forks, folder: Path, scenario: str) -> Whole:
    before, root, log = (folder / f"{scenario} {what}" for what in ("before", "root", "log"))
    before.mkdir()
    first = Said(0, json.loads(_good(forks.run("prepare", before, scenario=scenario)).stdout))
    powerloss.copy(before, root)
    child = _good(forks.run("live", root, scenario=scenario, faults={"log": str(log)}))
    steps, seconds = json.loads(child.stdout.splitlines()[-1])
    rmtree(root)
    return Whole(before, log, announced(first, child.stdout), steps, len(faults.operations(log)), seconds)


def _good(child: Child) -> Child:
    assert child.returncode == 0, f"{child.args}: {child.stderr[-4000:]}"
    return child


# -- kills -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One end of one life.

    Attributes:
        whole: what it would have been.
        scenario: its name.
        how: at a "step", an "operation" or a "moment".
        where: which, for people.
        options: of the job, such that it comes about.
        step: the step's name.
    """

    whole: Whole
    scenario: str
    how: str
    where: str
    options: dict[str, Any]
    step: str = ""


def _at_step(scenario: str, whole: Whole, number: int) -> Kill:
    name = whole.steps[number]
    return Kill(whole, scenario, "step", f"at step {number} ({name})", {"kill_at_step": number}, name)


def at_operation(scenario: str, whole: Whole, number: int, *, torn: bool) -> Kill:
    where = f"{'within' if torn else 'before'} operation {number}"
    return Kill(whole, scenario, "operation", where, {"faults": {"kill_at": number, "torn": torn}})


def _at_moment(scenario: str, whole: Whole, share: float) -> Kill:
    seconds = whole.seconds * share
    return Kill(whole, scenario, "moment", f"after {seconds:.4f} s", {"kill_after": seconds})


def spread(count: int, n: int) -> list[int]:
    """At most `count` different numbers of 0 to n - 1, as evenly as can be."""
    return sorted({part * (n - 1) // max(1, count - 1) for part in range(count)}) if n else []


def _last_of_each_step(wholes: dict[str, Whole]) -> Iterator[Kill]:
    """Each named step where a scenario comes by it for the last time."""
    last = {name: (scenario, number) for scenario, whole in wholes.items() for number, name in enumerate(whole.steps)}
    for scenario, number in last.values():
        yield _at_step(scenario, wholes[scenario], number)


def _long(wholes: dict[str, Whole]) -> Iterator[Kill]:
    yield from _last_of_each_step(wholes)
    random = Random(1)
    for scenario, whole in wholes.items():
        for number in spread(50, len(whole.steps)):
            yield _at_step(scenario, whole, number)
        for part, number in enumerate(spread(110, whole.n_operations)):
            yield at_operation(scenario, whole, number + 1, torn=part % 2 == 1)
        for _ in range(25):
            yield _at_moment(scenario, whole, 0.8 * random.random())


def _quick(wholes: dict[str, Whole]) -> Iterator[Kill]:
    yield from _last_of_each_step(wholes)
    random = Random(1)
    for part, (scenario, whole) in enumerate(wholes.items()):
        yield at_operation(scenario, whole, random.randint(1, whole.n_operations), torn=part % 2 == 1)
        if part % 2 == 0:
            yield _at_moment(scenario, whole, 0.8 * random.random())


def killed(forks: Forks, folder: Path, number: int, kill: Kill) -> str | None:
    """What is wrong behind a kill, nothing if that is nothing, None if the life came to its end before."""
    root = folder / f"killed {number}"
    powerloss.copy(kill.whole.root, root)
    try:
        child = forks.run("live", root, scenario=kill.scenario, **kill.options)
        if child.returncode == 0 and kill.how == "moment":
            return None
        what = f"{kill.scenario}, killed {kill.where}: "
        if child.returncode != -signal.SIGKILL:
            return f"{what}ended with {child.returncode}: {child.stderr[-1000:]}"
        said = [step.there for step in announced(kill.whole.said[0], child.stdout)]
        if said != [step.there for step in kill.whole.said[: len(said)]]:
            return f"{what}said something else than the whole life: {said}"
        found, complaint = looked(forks.run("look", root))
        complaint = complaint or missing(found, kill.whole.surely_there(len(said) - 1))
        return complaint and what + complaint
    finally:
        rmtree(root)


# -- a look at what is left ----------------------------------------------------------------------------------------------


def looked(child: Child) -> tuple[list[int], str]:
    """What `look` has found, or what is wrong."""
    if child.returncode == 0:
        return json.loads(child.stdout.splitlines()[-1]), ""
    said = child.stderr.strip().splitlines() or ["nothing said"]
    return [], f"the next open ended with {child.returncode}: {said[-1]}"


def missing(found: list[int], at_least: list[int]) -> str:
    """What isn't there although it was flushed, in words."""
    is_less = any(length < least for length, least in zip(found, at_least, strict=True))
    return f"{found} tokens are there, {at_least} were flushed" if is_less else ""


def look(root: Path, *, is_attached: bool = False) -> None:
    """Say how many of each chat's first tokens come back, when it is sure that all is in order and goes on.

    Args:
        root: where to look.
        is_attached: do before what `attach` does behind: remove blobs without rows, which are no harm.

    Raises:
        AssertionError: something isn't in order.
    """
    last = lives.CHATS[-1]
    with lives.opened(root) as cache:
        if is_attached:
            cache.repository.sweep()
        _assert_sound(cache)
        found = lives.restored(cache)
        cache.save(last, lives.MADE.state(last))
        assert lives.restored(cache, [last]) == [len(last)], "what was saved next isn't found"
        _assert_sound(cache)
    assert not Marker(root).path.exists(), "a proper close has left its marker"
    with lives.opened(root) as cache:
        assert lives.restored(cache, [last]) == [len(last)], "what was saved next isn't found after another start"
    print(json.dumps(found))


def _assert_sound(cache: PrefixCache) -> None:
    """An open that is alone has removed everything that doesn't fit, but for sound nodes whose parents are gone."""
    findings = [found.message for found in check(cache.repository) if found.trouble is not Trouble.UNREACHABLE]
    assert findings == [], f"{len(findings)} findings: {findings[:3]}"
    present = os.listdir(cache.repository.path)
    ours = {INDEX_FILE + suffix for suffix in SUFFIXES} | {cache.repository.blobs.folder.name}
    leftovers = [name for name in present if name.startswith((INDEX_FILE, "blobs-")) and name not in ours]
    assert leftovers == [], f"left behind: {leftovers}"


if __name__ == "__main__":
    faults.serve(lives.JOBS | {"look": look})
