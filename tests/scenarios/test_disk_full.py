"""Disks without room: for a moment, for good, and within a single write."""

import errno
import json
from pathlib import Path

import faults
import numpy as np
import pytest
from llamas import first_logits, generate, load, random_tokens

from kvkeep.cache import attach

PROMPTS = [random_tokens(200, seed=seed) for seed in range(4)]

# Four prompts, and what became of them. The disk is full from some operation on, as often as was asked for.
FULL = """
import json, logging, sys, llamas
from kvkeep.cache import attach
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
llm = llamas.load(sys.argv[1])
keep = attach(llm, sys.argv[2], break_even=False)
keep.flush()
import faults
faults.arm()
tokens = []
for seed in range(4):
    tokens.append(llamas.generate(llm, llamas.random_tokens(200, seed=seed), 4))
    keep.flush()
stats = keep.stats()
print(json.dumps([tokens, stats.errors, stats.saves]))
keep.close()
"""


@pytest.fixture(scope="module")
def answers(dense: str) -> list[list[int]]:
    """Of a model without a cache."""
    return [generate(load(dense), prompt, 4) for prompt in PROMPTS]


def again(model: str, root: Path) -> list[list[int]]:
    """The same prompts, in another process, which stores them."""
    llm, found = load(model), []
    with attach(llm, root, break_even=False) as keep:
        for prompt in PROMPTS:
            found.append(generate(llm, prompt, 4))
            keep.flush()
        assert keep.stats().errors == {}
    return found


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("at", "torn"), [(1, False), (20, True)])
def test_f1_a_disk_that_stays_full_costs_the_cache_and_no_answer(
    dense: str, root: Path, answers: list[list[int]], at: int, torn: bool
) -> None:
    """The stock cache raises `OSError` instead of the finished answer; others are dead for good although their own limit is far
    away, or leave half a file (DingoCache PR #83, Alluxio PR #13126, cvmfs #3083).
    """
    root.mkdir()
    child = faults.run(
        ["-c", FULL, dense, str(root)], root, armed=False, fail_at=at, fail_count=0, errno=errno.ENOSPC, torn=torn
    )
    assert child.returncode == 0, child.stderr[-4000:]
    tokens, errors, _ = json.loads(child.stdout.splitlines()[-1])
    assert tokens == answers
    assert errors, "the disk was never full: the test tests nothing"
    # Each kind of trouble is said once, however often it is met.
    assert 1 <= child.stderr.count("WARNING") <= len(errors) + 1
    # With room again the same folder works, and nothing strange is left in it.
    assert again(dense, root) == answers
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        assert [keep._session.usable_cache().match(prompt).length for prompt in PROMPTS] == [200] * 4
    assert {name.split("/")[-1] for name in files(root)} <= {
        "index.sqlite3",
        "index.sqlite3-wal",
        "index.sqlite3-shm",
        "data.mdb",
        "lock.mdb",
        "lock",
        "writer.lock",
        "compact.lock",
    }


@pytest.mark.parametrize(("at", "count"), [(3, 5), (12, 3)])
def test_f1_a_disk_that_is_full_for_a_moment_is_used_again_by_the_same_process(
    dense: str, root: Path, answers: list[list[int]], at: int, count: int
) -> None:
    """After one full disk nothing was ever cached again until the program was restarted (DingoCache PR #83)."""
    root.mkdir()
    child = faults.run(["-c", FULL, dense, str(root)], root, armed=False, fail_at=at, fail_count=count, errno=errno.ENOSPC)
    assert child.returncode == 0, child.stderr[-4000:]
    tokens, errors, saves = json.loads(child.stdout.splitlines()[-1])
    assert tokens == answers
    assert errors
    assert saves >= 2
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        assert keep._session.usable_cache().match(PROMPTS[3]).length == 200


def test_f1_a_disk_full_of_others_makes_room_by_what_is_old(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit isn't reached, but the disk is: then what is oldest here makes room for what is new (DingoCache PR #83)."""
    from kvkeep.store.space import Disk

    llm = load(dense)
    with attach(llm, root, reserve_bytes=1 << 30, break_even=False) as keep:
        for prompt in PROMPTS[:2]:
            first_logits(llm, prompt)
            keep.flush()
        # Others have taken all but what is to be left to them.
        monkeypatch.setattr(Disk, "of", classmethod(lambda cls, path: cls(100 << 30, 1 << 30)))
        for prompt in PROMPTS[2:]:
            found = first_logits(llm, prompt)
            keep.flush()
            np.testing.assert_allclose(found, first_logits(load(dense), prompt), atol=2e-3)
        cache = keep._session.usable_cache()
        assert cache.match(PROMPTS[3]).length == 200
        assert keep.stats().evicted > 0
        assert keep.stats().errors.total() <= 2
    assert len(caplog.records) <= 1
