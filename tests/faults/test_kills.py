"""What tests/stress/kills.py stands on: forked children are counted and killed as new processes are, and losses are seen."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import faults
import kills
import lives
import powerloss
import pytest
from faults import Forks
from kills import Whole

SCENARIO = "migrate"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    started = Forks(kills.__file__)
    yield started
    started.close()


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return kills.whole_life(forks, tmp_path_factory.mktemp("whole"), SCENARIO)


def test_a_forked_child_is_killed_at_the_operation_that_was_asked_for(forks: Forks, whole: Whole, tmp_path: Path) -> None:
    n = whole.n_operations // 2
    powerloss.copy(whole.root, tmp_path / "root")
    log = tmp_path / "log"
    child = forks.run("live", tmp_path / "root", scenario=SCENARIO, faults={"kill_at": n, "log": str(log)})
    assert child.returncode == -signal.SIGKILL
    done = [(op.number, op.kind, op.path, op.offset) for op in faults.operations(log)]
    assert done == [(op.number, op.kind, op.path, op.offset) for op in faults.operations(whole.log)[: n - 1]]


def test_a_forked_child_that_fails_or_hangs_says_so_and_the_next_one_works(forks: Forks, whole: Whole, tmp_path: Path) -> None:
    assert "KeyError: 'nothing'" in forks.run("live", tmp_path, scenario="nothing").stderr
    powerloss.copy(whole.root, tmp_path / "root")
    child = forks.run("live", tmp_path / "root", scenario=SCENARIO, timeout=0)
    assert (child.returncode, "it hung" in child.stderr) == (-signal.SIGKILL, True)
    assert forks.run("look", tmp_path / "root").returncode == 0


def test_what_is_lost_or_wrong_behind_a_kill_is_seen(forks: Forks, whole: Whole, tmp_path: Path) -> None:
    kill = kills.at_operation(SCENARIO, whole, whole.n_operations - 1, torn=False)
    assert kills.killed(forks, tmp_path, 0, kill) == ""
    more = [replace(said, there=[length + 1 for length in said.there]) for said in whole.said]
    assert "said something else" in str(kills.killed(forks, tmp_path, 0, replace(kill, whole=replace(whole, said=more))))


def test_what_is_gone_is_missed(forks: Forks, whole: Whole, tmp_path: Path) -> None:
    powerloss.copy(whole.root, tmp_path / "cleared")
    with lives.opened(tmp_path / "cleared") as cache:
        cache.clear()
    found, complaint = kills.looked(forks.run("look", tmp_path / "cleared"))
    assert (complaint, sum(found)) == ("", 0)
    assert "were flushed" in kills.missing(found, whole.surely_there(len(whole.said) - 1))
