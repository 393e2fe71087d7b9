"""What is on the disk, who can read it, how it gets off again, and what happens with what others have put there."""

import os
import pickle  # noqa: TID251 - written here, and read once to show what it would do
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
from commands import kvkeep, kvkeep_json
from llamas import first_logits, generate, load, random_tokens
from sparse import is_on_the_disk

from kvkeep.cache import LlamaDiskCache, PersistentLlamaCache, attach
from kvkeep.store.registry import close_root, open_root

PROMPT = random_tokens(200)
SECRET = random_tokens(150, seed=5)
OTHER = random_tokens(120, seed=7)
REPOSITORY = Path(__file__).parents[2]


def on_the_disk(root: Path, tokens: list[int]) -> bool:
    """Whether any run of these tokens is in the folder's files, be it as a remnant. Eight in a row are no accident."""
    return any(is_on_the_disk(np.asarray(tokens[at : at + 8], "<i4").tobytes(), root) for at in range(0, len(tokens) - 7, 24))


# -- F3: files of others -----------------------------------------------------------------------------------------------


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._proof),)


WARM = """
import sys
unpickled = []
sys.addaudithook(lambda event, arguments: event == "pickle.find_class" and unpickled.append(arguments))
import llamas
from kvkeep.cache import LlamaDiskCache, attach
unpickled.clear()
llm = llamas.load(sys.argv[1])
with attach(llm, sys.argv[2], break_even=False) as keep:
    llamas.generate(llm, llamas.random_tokens(200), 2)
    keep.flush()
    print(keep.last.length)
llm.set_cache(LlamaDiskCache(sys.argv[2]))
llm.create_completion(llamas.random_tokens(200), max_tokens=2)
print(unpickled)
"""


def test_f3_nothing_is_ever_unpickled(dense: str, root: Path, tmp_path: Path) -> None:
    """Whoever can write into the folder of a cache that unpickles runs what he likes (CVE-2025-69872, diskcache #357, PR #359;
    mlx-openai-server PR #286). Here there are hostile files of every name that the stock cache or kvkeep use.
    """
    proof = tmp_path / "proof"
    hostile = pickle.dumps(Hostile(proof))
    root.mkdir()
    (root / "blobs-7").mkdir()
    names = ["cache.db", "00.val", "state.pkl", "lock", "in-use", "blobs-7/data.mdb"]
    for name in names:
        (root / name).write_bytes(hostile)
    for expected in ("0", "199"):
        child = subprocess.run(
            [sys.executable, "-c", WARM, dense, str(root)],
            env=children.environment(children.__file__),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert child.returncode == 0, child.stderr[-4000:]
        assert child.stdout.split("\n")[:2] == [expected, "[]"]
    assert not proof.exists()
    # The test can fail: this is what it would have done.
    pickle.loads(hostile)  # noqa: S301
    assert proof.exists()


def values_of(root: Path) -> dict[bytes, bytes]:
    repository = open_root(root)
    with repository.snapshot() as snapshot:
        found = {bytes(name): bytes(snapshot.blobs.get(name) or b"") for name in snapshot.blobs.ids()}
    close_root(repository)
    return found


def changed(value: bytes, at: int, form: str, number: int) -> bytes:
    data = bytearray(value)
    struct.pack_into(form, data, at, number)
    return bytes(data)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("number", [1, (1 << 31) - 1, 1 << 63, (1 << 64) - 1])
def test_f3_lengths_that_can_not_be_are_a_miss_and_nothing_is_allocated_for_them(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch, number: int, compressed: bool
) -> None:
    """A header that is believed asks for 2^63 bytes, or a negative number of them (diskcache #362)."""
    if not compressed:
        monkeypatch.setattr("kvkeep.store.codec.WORTH_IT", 0.0)
    cold = first_logits(load(dense), PROMPT)
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
    repository = open_root(root)
    # The size of the plain frame, in front of it; where that isn't compressed, the numbers in it as well.
    places = [(8, "<Q")] + ([] if compressed else [(16 + 76, "<I"), (16 + 80, "<I"), (16 + 84, "<I"), (16 + 88, "<Q")])
    for i, (name, value) in enumerate(values_of(root).items()):
        at, form = places[i % len(places)]
        wrong = changed(value, at, form, number % (1 << 8 * struct.calcsize(form)))
        repository.blobs.put([(name, wrong)])  # type: ignore[list-item]
    close_root(repository)
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        np.testing.assert_allclose(first_logits(llm, PROMPT), cold, atol=2e-3)
        keep.flush()
        assert keep.stats().quarantined >= 1
        assert keep.stats().errors == {}
        # Stored anew.
        assert keep._session.usable_cache().match(PROMPT).length == 200


# -- F4: what is kept of a chat ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["attach", "for_model", "LlamaDiskCache", "kvkeep budget"])
def test_f4_only_the_owner_can_read_it_whoever_makes_the_folder(dense: str, root: Path, way: str) -> None:
    """Chats could be read by everybody on the machine (diskcache PR #359, d-inference PR #237)."""
    before = os.umask(0)
    try:
        llm = load(dense)
        if way == "kvkeep budget":
            kvkeep("budget", "--path", root, "--daily", "1GiB")
        if way == "LlamaDiskCache":
            llm.set_cache(cache := LlamaDiskCache(str(root)))
            llm.create_completion(PROMPT, max_tokens=2)
            cache.flush()
        elif way == "for_model":
            llm.set_cache(cache := PersistentLlamaCache.for_model(llm, root))
            llm.create_completion(PROMPT, max_tokens=2)
            cache.flush()
        else:
            cache = attach(llm, root)
            generate(llm, PROMPT, 2)
            cache.flush()
        kvkeep("compact", "--path", root)
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
        cache.close()
    finally:
        os.umask(before)
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "recurrent", "opaque"])
def test_f4_nothing_of_a_private_request_is_on_the_disk(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """A chat that isn't to be kept leaves nothing, neither a row nor a remnant in a log (gpt4all #1904)."""
    llm = load(request.getfixturevalue(kind))
    with attach(llm, root, break_even=False) as keep:
        generate(llm, PROMPT, 2)
        with keep.no_store():
            generate(llm, PROMPT + SECRET, 2)
            keep.flush()
        generate(llm, OTHER, 2)
        keep.flush()
        assert on_the_disk(root, PROMPT)
        assert not on_the_disk(root, SECRET)
    assert not on_the_disk(root, SECRET)


@pytest.mark.parametrize("way", ["detach", "close", "set_cache(None)"])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_f4_once_it_is_turned_off_nothing_more_is_saved(
    kind: str, root: Path, way: str, request: pytest.FixtureRequest
) -> None:
    """People turned saving off, and their chats were saved all the same (gpt4all #1904, #1591)."""
    llm = load(request.getfixturevalue(kind))
    cache: Any
    if way == "set_cache(None)":
        cache = LlamaDiskCache(str(root))
        llm.set_cache(cache)
        llm.create_completion(PROMPT, max_tokens=2)
        llm.set_cache(None)
    else:
        cache = attach(llm, root, break_even=False)
        generate(llm, PROMPT, 2)
        getattr(cache, way)()
    llm.create_completion(SECRET, max_tokens=2)
    generate(llm, SECRET, 2)
    cache.flush()
    cache.close()
    llm.close()
    assert on_the_disk(root, PROMPT[:32])
    assert not on_the_disk(root, SECRET)


@pytest.mark.parametrize("kind", ["dense", "window"])
@pytest.mark.parametrize("way", ["LlamaDiskCache", "for_model"])
@pytest.mark.parametrize("in_the_middle", [False, True])
def test_f4_a_cache_that_is_taken_away_and_given_back_keeps_nothing_of_the_time_between(
    kind: str, root: Path, way: str, in_the_middle: bool, request: pytest.FixtureRequest
) -> None:
    """`set_cache(None)` is how people turn it off, also in the middle of an answer (gpt4all #1904)."""
    model = request.getfixturevalue(kind)
    cold = first_logits(load(model), PROMPT)
    said: list[int] = []
    llm = load(model)
    cache: Any = (
        LlamaDiskCache(str(root)) if way == "LlamaDiskCache" else PersistentLlamaCache.for_model(llm, root, break_even=False)
    )
    llm.set_cache(cache)
    llm.create_completion(PROMPT, max_tokens=2)
    if in_the_middle:
        stream = llm.generate(OTHER, temp=0.0)
        next(stream)
        llm.set_cache(None)
        said = [next(stream, 0) for _ in range(14)]
        stream.close()
    llm.set_cache(None)
    llm.create_completion(SECRET, max_tokens=2)
    cache.flush()
    assert not on_the_disk(root, SECRET)
    # The first of them was decoded when it was still on.
    assert not on_the_disk(root, said[2:])
    llm.set_cache(cache)
    answer = llm.create_completion([*OTHER[:60], *PROMPT], max_tokens=2, temperature=0.0)
    other = load(model).create_completion([*OTHER[:60], *PROMPT], max_tokens=2, temperature=0.0)
    assert answer["choices"] == other["choices"]
    np.testing.assert_allclose(first_logits(llm, PROMPT), cold, atol=5e-3)
    cache.flush()
    assert on_the_disk(root, OTHER[:60])
    cache.close()
    assert not on_the_disk(root, SECRET)


@pytest.mark.parametrize("way", ["clear", "rm", "lifetime"])
@pytest.mark.parametrize("kind", ["dense", "window", "hybrid"])
def test_f4_what_is_removed_is_gone_from_every_file(kind: str, root: Path, way: str, request: pytest.FixtureRequest) -> None:
    """People asked for the exact steps after which nothing is left (hudsonwa #90): remove, then compact, also beside a running
    assistant.
    """
    llm = load(request.getfixturevalue(kind))
    with attach(llm, root, break_even=False) as keep:
        generate(llm, SECRET, 2)
        keep.flush()
        assert on_the_disk(root, SECRET)
        if way == "clear":
            assert keep.clear() > 0
        elif way == "rm":
            kvkeep("rm", "--path", root, "--all", "--force", "--yes")
        else:
            kvkeep("budget", "--path", root, "--lifetime", "1s")
            repository = keep._session.usable_cache().repository
            with repository.index.write() as connection:
                for table in ("node", "window", "checkpoint"):
                    connection.exec_driver_sql(f"UPDATE {table} SET used = used - 60")
        kvkeep("compact", "--path", root)
        assert not on_the_disk(root, SECRET)
        assert kvkeep_json("stats", "--path", root)["totals"]["tokens"] == 0
    # The end of the program doesn't bring it back.
    assert not on_the_disk(root, SECRET)


def test_f4_behind_a_clear_the_next_request_is_kept_again(dense: str, root: Path) -> None:
    """Removing what there is isn't turning it off (hudsonwa #90): the same prompt comes back when it is asked again."""
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        generate(llm, PROMPT, 2)
        keep.clear()
        keep.flush()
        assert keep._session.usable_cache().match(PROMPT).length == 0
        generate(llm, PROMPT, 2)
        keep.flush()
        assert keep._session.usable_cache().match(PROMPT).length == 200


def test_f4_the_documentation_says_that_tokens_can_be_read() -> None:
    """Nobody should have to look into the files to learn that (hudsonwa #90, d-inference PR #237)."""
    text = " ".join((REPOSITORY / "README.md").read_text().split())
    assert "holds the tokens of your chats and the states made of them, readable by whoever can read it" in text
    assert "It isn't encrypted" in text
    assert "`kvkeep rm --all --force`, then `kvkeep compact`" in text
