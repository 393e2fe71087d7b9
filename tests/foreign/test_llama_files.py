"""Files of llama.cpp: those that it has written itself, and those that somebody else has changed."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from foreign import SEQUENCE_MAGIC, SESSION_MAGIC, saved_by_llama_cpp, state_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llamas import load, random_tokens, sequence_state, whole_state
from restart import run_child

from kvkeep.cache.foreign.item import Item
from kvkeep.cache.foreign.llama_files import found_at, is_llama_file
from kvkeep.cache.state import Form
from kvkeep.store.errors import KvkeepError, TooLarge, TruncatedState, UnknownLayout, UsageError

ENOUGH = 1 << 30
TOKENS = random_tokens(70)


def read(path: Path) -> Item:
    return found_at(path).read(ENOUGH)


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "recurrent", "opaque"])
def test_what_llama_cpp_has_written(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    llm = load(model)
    llm.eval(TOKENS)
    states = {"sequence": (Form.SEQUENCE, sequence_state(llm)), "session": (Form.WHOLE, whole_state(llm))}
    for what, (form, state) in states.items():
        path = saved_by_llama_cpp(tmp_path / what, what, model, TOKENS)
        assert is_llama_file(path)
        item = read(path)
        assert item.form is form
        assert item.tokens.tolist() == TOKENS
        assert np.array_equal(item.data, state), what
    llm.close()


def test_tokens_as_llama_server_packs_them(tmp_path: Path) -> None:
    packed = [-1, 1, 3, 10, 11, 12, 0]
    assert read(state_file(tmp_path / "file", packed, b"memory")).tokens.tolist() == [10, 11, 12]


@pytest.mark.parametrize(
    ("packed", "kind", "words"),
    [
        ([-1, 2, 1, 10, 0], UnknownLayout, "version 2; this kvkeep reads 1"),
        ([-1, 1, 0, 0], UnknownLayout, "names no tokens"),
        ([-1], UnknownLayout, "version none"),
        ([-1, 1, 1], UnknownLayout, "version 1; this"),
        ([-1, 1, 5, 10, 0], TruncatedState, "5 packed tokens"),
        ([-1, 1, -5, 10, 0], TruncatedState, "-5 packed tokens"),
        ([-1, 1, 2, 10, -1, 0], UnknownLayout, "no token ids"),
        ([-1, 1, 2, 10, 11, 1, 0], UnknownLayout, "images or sounds"),
        ([-1, 1, 2, 10, 11, 0, 0], TruncatedState, "1 numbers too many"),
    ],
)
def test_tokens_that_are_packed_otherwise(packed: list[int], kind: type[KvkeepError], words: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=words):
        read(state_file(tmp_path / "file", packed, b"memory"))


@pytest.mark.parametrize(("magic", "version"), [(SEQUENCE_MAGIC, 3), (SESSION_MAGIC, 10)])
def test_other_versions_are_named(magic: int, version: int, tmp_path: Path) -> None:
    for other in (0, version - 1, version + 1, (1 << 32) - 1):
        path = state_file(tmp_path / "file", [1], b"memory", magic=magic, version=other)
        with pytest.raises(UnknownLayout, match=f"version {other}; this kvkeep reads version {version}"):
            read(path)


@pytest.mark.parametrize("count", [(1 << 32) - 1, 1 << 31, 1 << 24, 3])
def test_more_tokens_than_the_file_has(count: int, tmp_path: Path) -> None:
    path = state_file(tmp_path / "file", [10, 11], b"abc", count=count)
    with pytest.raises(TruncatedState, match=f"{count} tokens"):
        read(path)
    # A file with a hole has any length, and nothing in it.
    os.truncate(path, 1 << 40)
    with pytest.raises(TruncatedState if count > 1 << 24 else TooLarge):
        read(path)


def test_no_tokens_and_negative_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownLayout, match="names no tokens"):
        read(state_file(tmp_path / "file", [], b"memory"))
    with pytest.raises(UnknownLayout, match="no token ids"):
        read(state_file(tmp_path / "file", [10, -1, 12], b"memory"))


def test_a_state_beyond_the_budget_is_not_read(tmp_path: Path) -> None:
    found = found_at(state_file(tmp_path / "file", [10], bytes(1000)))
    assert found.read(1000).data.size == 1008  # with the head of the sequence form
    with pytest.raises(TooLarge, match="1000 bytes"):
        found.read(999)


def test_every_length_but_the_whole_ends_in_an_error_or_a_shorter_state(tmp_path: Path) -> None:
    """Where the state ends only its parser knows; see test_taking.py."""
    data = state_file(tmp_path / "file", [10, 11, 12], b"memory").read_bytes()
    for length in range(len(data)):
        (tmp_path / "short").write_bytes(data[:length])
        if length < 24:
            with pytest.raises(TruncatedState):
                read(tmp_path / "short")
        else:
            assert read(tmp_path / "short").data.size == 8 + length - 24


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"another file")
    assert not is_llama_file(tmp_path / "other")
    (tmp_path / "empty").write_bytes(b"")
    assert not is_llama_file(tmp_path / "empty")
    with pytest.raises(UsageError, match="does not exist"):
        is_llama_file(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnknownLayout, match="is no file"):
        is_llama_file(tmp_path / "pipe")


CHILD = """
import os, sys
from pathlib import Path
from kvkeep.cache.foreign.paths import contents
os.setgid(65534); os.setuid(65534)
for name, error in contents([Path(sys.argv[1])]).failed:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_one_that_this_user_may_not_read(tmp_path: Path) -> None:
    path = state_file(tmp_path / "file", [10], b"memory")
    path.chmod(0o000)
    for folder in list(path.parents)[:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    for named in (path, tmp_path):
        child = run_child(["-c", CHILD, str(named)])
        assert child.stdout == f"UsageError {path} can't be read by this user\n", child.stderr


def test_one_that_was_replaced_since(tmp_path: Path) -> None:
    found = found_at(state_file(tmp_path / "file", [10], b"memory"))
    (tmp_path / "file").write_bytes(b"something else now")
    with pytest.raises(UnknownLayout, match="neither"):
        found.read(ENOUGH)
    (tmp_path / "file").unlink()
    with pytest.raises(UsageError, match="does not exist"):
        found.read(ENOUGH)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(head=st.lists(st.sampled_from([0, 1, 3, 10, 2, 5, (1 << 32) - 1, 1 << 31, SEQUENCE_MAGIC, SESSION_MAGIC]), max_size=9))
def test_any_file_is_read_or_refused(head: list[int], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<II", SEQUENCE_MAGIC, 3) + struct.pack(f"<{len(head)}I", *head))
    try:
        item = read(path)
    except KvkeepError:
        return
    assert item.tokens.size > 0
    assert item.tokens.min() >= 0
