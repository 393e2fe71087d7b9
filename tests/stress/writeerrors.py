"""A disk that is full or gives errors, at every operation: nothing but errors of kvkeep, no wrong state, and then it goes on.

First lives of a root (tests/support/lives.py) whose operations fail here and there, and which go on with their next step. Then
a real model: its answers are the same, one warning is logged for each kind of error, and with room again the cache works.
"""

import errno
import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import faults
import kills
import lives
import models
import powerloss
import restart
from faults import Forks
from figures import AtLeast, Figure, Run
from kills import Whole
from synthetic import random_tokens

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.errors import KvkeepError

SCENARIOS = ("save", "again", "compact")
# Operations of a scenario at which something fails, in the long version: all, but for the longest one.
_MOST = 540

PROMPTS = [random_tokens(length, seed=length, n_vocab=500) for length in (200, 300, 250, 220, 230)]
# Which operation of a save by a real model is the first to fail: within LMDB's commit, SQLite's, or behind.
_FIRST = (1, 2, 3, 5, 8, 13, 21, 34)


@dataclass(frozen=True)
class _Kind:
    """How operations fail."""

    name: str
    options: dict[str, Any]


KINDS = (
    _Kind("disk full", {"errno": errno.ENOSPC}),
    _Kind("disk full for 20 operations", {"errno": errno.ENOSPC, "fail_count": 20}),
    _Kind("write error", {"errno": errno.EIO}),
    _Kind("short write, then disk full for 2 operations", {"errno": errno.ENOSPC, "fail_count": 3, "torn": True}),
)


def measure(run: Run) -> list[Figure]:
    with kills.workers(__file__) as in_parallel:
        wholes = kills.whole_lives(in_parallel, run.folder, list(SCENARIOS))
        tasks = list(_tasks(wholes, quick=run.quick))
        run.say(f"{len(tasks)} lives with failing operations")
        seen = in_parallel(lambda forks, task: _disturbed(forks, run.folder, *task), list(enumerate(tasks)))
    caught: Counter[str] = sum((one.caught for one in seen), Counter())
    detail = ", ".join(f"{count} {name}" for name, count in caught.most_common())
    return [
        Figure("lives with failing operations", len(seen), "", None, f"of {', '.join(SCENARIOS)}"),
        Figure("errors of kvkeep that they met", caught.total(), "", AtLeast(len(seen) / 4), detail),
        kills.violations([one.complaint for one in seen]),
        *_beside_a_model(run),
    ]


# -- lives -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """A life in which operations fail."""

    whole: Whole
    scenario: str
    n: int
    kind: _Kind


@dataclass(frozen=True)
class _Seen:
    """Which errors of kvkeep it met, and what was wrong."""

    caught: Counter[str]
    complaint: str = ""


def _tasks(wholes: dict[str, Whole], *, quick: bool) -> Iterator[_Task]:
    """Operations of each scenario, with one kind of error after the other; where there are few, each with all."""
    for scenario, whole in wholes.items():
        numbers = kills.spread(8 if quick else _MOST, whole.n_operations)
        for part, number in enumerate(numbers):
            for kind in KINDS if len(numbers) < _MOST // 2 and not quick else [KINDS[part % len(KINDS)]]:
                yield _Task(whole, scenario, number + 1, kind)


def _disturbed(forks: Forks, folder: Path, number: int, task: _Task) -> _Seen:
    root = folder / f"disturbed {number}"
    powerloss.copy(task.whole.root, root)
    what = f"{task.scenario}, {task.kind.name} at operation {task.n}: "
    try:
        child = forks.run("live on", root, scenario=task.scenario, faults=task.kind.options | {"fail_at": task.n})
        if child.returncode != 0:
            said = child.stderr.strip().splitlines() or ["nothing said"]
            return _Seen(Counter(), f"{what}ended with {child.returncode}: {said[-1]}")
        caught = Counter(json.loads(child.stdout.splitlines()[-1]))
        found, complaint = kills.looked(forks.run("look", root, is_attached=True))
    finally:
        rmtree(root)
    failing = task.kind.options.get("fail_count", 1)
    if not complaint and caught.total() > failing:
        complaint = f"{dict(caught)} although only {failing} operations failed: it goes on failing"
    # Errors are no reason to lose anything: what no step takes away is there in the end.
    at_least = [min(lengths) for lengths in zip(*(said.there for said in task.whole.said), strict=True)]
    complaint = complaint or kills.missing(found, at_least)
    return _Seen(caught, complaint and what + complaint)


def live_on(root: Path, scenario: str) -> None:
    """A life that goes on behind errors of kvkeep; when the disk works again, so does the next save.

    Says which errors it met.
    """
    life = lives.Life(root, patient=True)
    lives.SCENARIOS[scenario].live(life)
    caught = list(life.caught)
    faults.rest()
    last = lives.CHATS[-1]
    life.save(last)
    life.do(lambda cache: _assert_found(lives.restored(cache)[-1]))
    life.close()
    assert life.caught == caught, f"the disk works again, and kvkeep says {life.caught[len(caught) :]}"
    print(json.dumps(Counter(caught)))


def _assert_found(length: int) -> None:
    assert length == len(lives.CHATS[-1]), "the disk works again, and what is saved isn't found"


# -- a real model --------------------------------------------------------------------------------------------------------


def _beside_a_model(run: Run) -> list[Figure]:
    model = models.build(run.folder / "model.gguf", models.DENSE)
    # The third operation writes LMDB's first page, and behind its failure LMDB wants to be opened anew.
    chats = [
        _Chat(number, first, n_prompts)
        for first in ((3,) if run.quick else _FIRST)
        for number in (errno.ENOSPC, errno.EIO)
        for n_prompts in ((1,) if run.quick else (1, 3))
    ]
    with kills.workers(__file__) as in_parallel:
        seen = in_parallel(lambda forks, chat: _generated(forks, run.folder, model, chat), chats)
    warned = sum((Counter(answer["warned"]) for answer, _ in seen), Counter())
    return [
        Figure("chats with a model whose disk fails", len(seen), "", None, "from the second prompt on, for one or three"),
        Figure("warnings that they logged", warned.total(), "", AtLeast(len(seen) / 2), ", ".join(warned)),
        replace(kills.violations([complaint for _, complaint in seen]), name="violations beside a model"),
    ]


@dataclass(frozen=True)
class _Chat:
    """A chat with a model whose disk fails.

    Attributes:
        number: how.
        first: which operation of the second prompt is the first to fail.
        n_prompts: for how many prompts it does.
    """

    number: int
    first: int
    n_prompts: int


def _generated(forks: Forks, folder: Path, model: str, chat: _Chat) -> tuple[dict[str, Any], str]:
    """What a chat answers, and what is wrong with it."""
    name = f"{errno.errorcode[chat.number]} from operation {chat.first} on, for {chat.n_prompts} prompts"
    root = folder / name
    root.mkdir()
    child = forks.run("generate", root, model=model, chat=asdict(chat))
    if child.returncode != 0:
        return {"warned": []}, f"{name}: ended with {child.returncode}: {child.stderr[-1000:]}"
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    found, warned = answer["found"], answer["warned"]
    (again,) = restart.in_new_process(model, root, [PROMPTS[-1]])
    complaints = {
        "other tokens than without a cache": answer["tokens"] != answer["cold tokens"],
        f"a kind of error was logged twice: {warned}": len(set(warned)) < len(warned),
        f"with room again, {found} tokens were found behind saves": found != list(map(len, PROMPTS[1 + chat.n_prompts :])),
        f"what was saved last isn't there: {again['decoded']} tokens were decoded": again["decoded"] != 1,
    }
    wrong = [what for what, is_so in complaints.items() if is_so]
    return answer, f"{name}: {'; '.join(wrong)}" if wrong else ""


def generate(root: Path, model: str, chat: dict[str, int]) -> None:
    """Prompts with a cache, some with a failing disk, and the same without; what was logged, and what is found in the end."""
    import llamas

    from kvkeep.cache import attach

    faults.rest()
    logged: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = logged.append  # type: ignore[method-assign, assignment]
    logging.getLogger("kvkeep").addHandler(handler)
    llm, cold = llamas.load(model), llamas.load(model)
    keep = attach(llm, root, break_even=False)
    tokens, found = [], []
    for position, prompt in enumerate(PROMPTS):
        if position == 1:
            faults.begin(root, fail_at=chat["first"], fail_count=0, errno=chat["number"])
        if position == 1 + chat["n_prompts"]:
            faults.rest()
        tokens.append(llamas.generate(llm, prompt, 4))
        keep.flush()
        if position > chat["n_prompts"]:
            found.append(_found(keep._session.cache, prompt))
    keep.close()
    cold_tokens = [llamas.generate(cold, prompt, 4) for prompt in PROMPTS]
    # What is one kind: the sentence, what failed, and the type of its error.
    arguments = [(record.msg, record.args) for record in logged if isinstance(record.args, tuple) and record.args]
    warned = [msg % (args[0], type(args[-1]).__name__) for msg, args in arguments]
    print(json.dumps({"tokens": tokens, "cold tokens": cold_tokens, "warned": warned, "found": found}))


def _found(cache: PrefixCache | None, prompt: list[int]) -> int:
    """How much of a prompt is on the disk by now."""
    try:
        return 0 if cache is None else cache.match(prompt).length
    except KvkeepError:
        return 0


if __name__ == "__main__":
    faults.serve(lives.JOBS | {"look": kills.look, "live on": live_on, "generate": generate})
