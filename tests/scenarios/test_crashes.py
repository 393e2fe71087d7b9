"""How programs end: killed in the middle of a save, told to stop, or by themselves in one of many ways."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
from llamas import first_logits, load, random_tokens

from kvkeep.cache import attach

# -- D1: killed while it saves -----------------------------------------------------------------------------------------

# Says what is on the disk, begins to save the next one, and says so.
SAVING = """
import sys, threading, llamas
from kvkeep.cache import attach
from kvkeep.store import steps
model, root, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
llm = llamas.load(model)
keep = attach(llm, root, break_even=False)
keep.flush()
reached = 0
def on_step(step):
    global reached
    reached += 1
    if reached == count:
        print("now", flush=True)
        threading.Event().wait()
seed = int(sys.argv[4])
for number in range(3):
    llamas.first_logits(llm, llamas.random_tokens(100 + 40 * number, seed=seed))
    keep.flush()
    print(100 + 40 * number, flush=True)
steps.on_step = on_step
llamas.first_logits(llm, llamas.random_tokens(300, seed=seed))
keep.flush()
print("done", flush=True)
"""


def started(script: str, *arguments: object) -> "subprocess.Popen[str]":
    """A Python process with its output at hand."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], env=children.environment(children.__file__), **pipes
    )


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_d1_a_kill_in_the_middle_of_a_save_leaves_the_old_or_the_new(
    kind: str, root: Path, request: pytest.FixtureRequest
) -> None:
    """An index of one save with the tensors of another answered every request with `!!!!`; several SIGTERMs lost a third of all
    entries, one at the wrong moment all of them (Rapid-MLX PR #187, #853, #880). Here one process after the other is killed in
    the same folder, each at another step of a save; 1,000 and more are in `make stress`.
    """
    model = request.getfixturevalue(kind)
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL]
    for count, number in enumerate(signals, start=1):
        process = started(SAVING, model, root, count, count)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(4)] == ["100\n", "140\n", "180\n", "now\n"]
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == -number
    control = load(model)
    llm = load(model)
    with attach(llm, root, break_even=False) as keep:
        for seed in range(1, len(signals) + 1):
            prompt = random_tokens(300, seed=seed)
            stored = keep._session.usable_cache().match(prompt).length
            # What was flushed is there; of what was killed, nothing, a sound first part, or all.
            assert 180 <= stored <= 300
            found = first_logits(llm, prompt)
            assert keep.last is not None
            assert keep.last.length == min(stored, 299) or kind == "hybrid"
            np.testing.assert_allclose(found, first_logits(control, prompt), atol=5e-3)
        keep.flush()
        assert keep.stats().errors == {}
        assert keep.stats().quarantined == 0


# -- D6: the end -------------------------------------------------------------------------------------------------------

# A first turn that is stored for long, and a second one right before the end.
LIFE = """
import os, signal, sys, threading, time, llamas
from kvkeep.cache import attach
llm = llamas.load(sys.argv[1])
keep = attach(llm, sys.argv[2], break_even=False)
llamas.generate(llm, llamas.random_tokens(200), 2)
keep.flush()
def turn():
    llamas.generate(llm, llamas.random_tokens(300), 2)
{end}
"""

SOFT_ENDS = {
    "sys.exit in a thread": "t = threading.Thread(target=lambda: (turn(), sys.exit(1))); t.start(); t.join()",
    "a thread that outlives the main one": "threading.Thread(target=turn).start()",
    "Ctrl-C": "turn(); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "SIGTERM that the program takes for an exit": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); turn(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    ),
    "twice": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); turn()\n"
        "import atexit; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); os.kill(os.getpid(), signal.SIGTERM)"
    ),
}

HARD_ENDS = {
    "os._exit": "turn(); os._exit(0)",
    "SIGTERM": "turn(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "SIGHUP, as of a terminal that is closed": "turn(); os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)",
}


def reused(model: str, root: Path) -> int:
    """How many tokens of the second turn the next process has: this one, whose answer is the cold one."""
    llm = load(model)
    with attach(llm, root, break_even=False) as keep:
        found = first_logits(llm, random_tokens(300))
        assert keep.last is not None
    np.testing.assert_allclose(found, first_logits(load(model), random_tokens(300)), atol=2e-3)
    return keep.last.length


@pytest.mark.parametrize("end", SOFT_ENDS)
def test_d6_whoever_ends_by_himself_leaves_the_last_turn(dense: str, root: Path, end: str) -> None:
    """Chats were lost with empty temporary files, queues were dropped at the end (gpt4all #3145, omlx #1070, home-ops PR
    #9684). More ways, with streams left open, in tests/adapters/test_attach.py.
    """
    process = started(LIFE.format(end=SOFT_ENDS[end]), dense, root)
    _, said = process.communicate(timeout=120)
    assert reused(dense, root) == 299, said
    assert "kvkeep" not in said.replace("from kvkeep", "")


@pytest.mark.parametrize("end", HARD_ENDS)
def test_d6_whoever_is_ended_harms_nothing_older(dense: str, root: Path, end: str) -> None:
    """What nobody can do anything about costs the last turn at most (omlx #1070, gpt4all #3145)."""
    process = started(LIFE.format(end=HARD_ENDS[end]), dense, root)
    process.communicate(timeout=120)
    assert 200 <= reused(dense, root) <= 299


def test_d6_who_has_flushed_may_end_as_he_likes(dense: str, root: Path) -> None:
    """`flush` is for those who know that their end is a hard one (home-ops PR #9684)."""
    process = started(LIFE.format(end="turn(); keep.flush(); os._exit(0)"), dense, root)
    process.communicate(timeout=120)
    assert reused(dense, root) == 299
    leftovers = [path.name for path in root.rglob("*") if path.is_file() and path.stat().st_size == 0]
    assert set(leftovers) <= {"lock", "writer.lock", "compact.lock", "in-use", "index.sqlite3-wal"}
