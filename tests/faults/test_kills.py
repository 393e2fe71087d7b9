"""A process that is killed at any operation leaves a root that opens, is sound, and holds what was flushed."""

import signal
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

import faults
import lives
import numpy as np
import pytest
from lives import Step

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.check import Trouble, check

LIVES = Path(lives.__file__)
# Kills of each scenario, spread evenly over its operations; half of those that meet a write leave half of it.
KILLS = 40
# What a killed writer may leave: none of it is ever served.
HARMLESS = {Trouble.GARBAGE, Trouble.UNREACHABLE}


@dataclass(frozen=True)
class Life:
    """A scenario that came to its end.

    Attributes:
        n_operations: how many it has.
        said: what was there after each step.
    """

    n_operations: int
    said: list[Step]

    def surely_there(self, n_steps: int) -> list[int]:
        """Of each chat, what a kill in the step after the first `n_steps` can't take away: what that step would leave."""
        near = [step.there for step in self.said[n_steps : n_steps + 2]]
        return [min(lengths) for lengths in zip(*near, strict=True)]


@cache
def whole_life(scenario: str) -> Life:
    with TemporaryDirectory() as folder:
        root, log = Path(folder, "root"), Path(folder, "log")
        root.mkdir()
        child = faults.run([str(LIVES), scenario, str(root)], root, log=log)
        assert child.returncode == 0, child.stderr[-4000:]
        return Life(len(faults.operations(log)), lives.announced(child.stdout))


@pytest.mark.parametrize("scenario", lives.SCENARIOS)
def test_a_whole_life_has_what_a_kill_may_meet(scenario: str) -> None:
    life = whole_life(scenario)
    assert life.n_operations > KILLS
    # Something was evicted on the way, so that kills meet that too.
    assert any(
        late < early for before, after in pairwise(life.said) for early, late in zip(before.there, after.there, strict=True)
    )


@pytest.mark.parametrize("part", range(KILLS))
@pytest.mark.parametrize("scenario", lives.SCENARIOS)
def test_a_kill_at_any_operation_loses_nothing_that_was_flushed(scenario: str, part: int, tmp_path: Path) -> None:
    life = whole_life(scenario)
    n = 1 + part * (life.n_operations - 1) // (KILLS - 1)
    root = tmp_path / "root"
    root.mkdir()
    child = faults.run([str(LIVES), scenario, str(root)], root, kill_at=n, torn=part % 2 == 1)
    assert child.returncode == -signal.SIGKILL, f"operation {n}: {child.stderr[-4000:]}"
    said = lives.announced(child.stdout)
    assert said == life.said[: len(said)]
    at_least = life.surely_there(len(said) - 1)
    with lives.opened(root) as cache_after:
        _assert_sound(cache_after)
        found = _restored(cache_after)
        assert all(length >= least for length, least in zip(found, at_least, strict=True)), (n, found, at_least)
        _assert_goes_on(cache_after)
    rmtree(root)


def _assert_sound(cache_after: PrefixCache) -> None:
    findings = [found for found in check(cache_after.repository) if found.trouble not in HARMLESS]
    assert [found.message for found in findings] == []


def _restored(cache_after: PrefixCache) -> list[int]:
    """How many of each chat's first tokens come back, after they were compared with what a context would hold."""
    found = []
    for chat in lives.CHATS:
        matched = cache_after.match(chat)
        restored = cache_after.restore(matched, chat)
        assert restored.length == matched.length
        assert not restored.damaged
        if restored.length:
            assert np.array_equal(restored.state, lives.MADE.state(chat[: restored.length]))
        found.append(restored.length)
    return found


def _assert_goes_on(cache_after: PrefixCache) -> None:
    """Whatever was left over, the next save works and leaves nothing that doesn't fit."""
    chat = lives.CHATS[-1]
    cache_after.save(chat, lives.MADE.state(chat))
    assert _restored(cache_after)[-1] == len(chat)
    _assert_sound(cache_after)
