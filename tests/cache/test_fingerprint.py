"""The identity of a model: same content, same fingerprint; anything else, another one."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.cache import fingerprint
from kvkeep.cache.fingerprint import Identification, Ingredients, combine, model_files
from kvkeep.store.errors import NotIdentified, StoreLocked
from kvkeep.store.hashing import Fingerprint
from kvkeep.store.repository import Repository

LONG = 30.0


class Outcome:
    """What an identification reported."""

    def __init__(self) -> None:
        self.ready: list[Fingerprint] = []
        self.failed: list[OSError] = []
        self.threads: list[str] = []

    def __call__(self, found: Fingerprint) -> None:
        self.ready.append(found)
        self.threads.append(threading.current_thread().name)


def identify(repository: Repository, *files: Path, **fields: str) -> tuple[Identification, Outcome]:
    outcome = Outcome()
    ingredients = Ingredients(fields, tuple(map(str, files)))
    identification = Identification(ingredients, repository, outcome, outcome.failed.append)
    identification.start()
    return identification, outcome


def identified(repository: Repository, *files: Path, **fields: str) -> Fingerprint:
    identification, outcome = identify(repository, *files, **fields)
    identification.wait()
    assert outcome.failed == []
    (found,) = outcome.ready
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights of a model")
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were really read."""
    read: list[str] = []
    original = fingerprint.digest_file

    def digest_file(path: str, **options: Callable[[int], None]) -> bytes:
        read.append(os.path.basename(path))
        return original(path, **options)

    monkeypatch.setattr(fingerprint, "digest_file", digest_file)
    return read


# -- names of files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("model.gguf", ["model.gguf"]),
        ("/a/m-00001-of-00001.gguf", ["/a/m-00001-of-00001.gguf"]),
        ("/a/m-00001-of-00003.gguf", [f"/a/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]),
        ("/a/m-00002-of-00003.gguf", [f"/a/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]),
        ("/a/m-00001-of-00012.gguf", [f"/a/m-{i:05d}-of-00012.gguf" for i in range(1, 13)]),
        ("/a-00001-of-00002.gguf/m.gguf", ["/a-00001-of-00002.gguf/m.gguf"]),
        ("/a/m-1-of-3.gguf", ["/a/m-1-of-3.gguf"]),
        ("/a/m-00001-of-00003.gguf.bak", ["/a/m-00001-of-00003.gguf.bak"]),
        ("/a/m-00001-of-00003.bin", ["/a/m-00001-of-00003.bin"]),
        # Not a split model at all; but a fingerprint without weights would fit every model.
        ("/a/m-00001-of-00000.gguf", ["/a/m-00001-of-00000.gguf"]),
    ],
)
def test_all_parts_of_a_split_model_count(path: str, files: list[str]) -> None:
    assert list(model_files(path)) == files


# -- combining ----------------------------------------------------------------------------------------------------------

ONE, TWO = b"1" * 32, b"2" * 32
texts = st.text(st.characters(codec="ascii"), max_size=4)
fields = st.dictionaries(texts.filter(lambda name: not name.startswith("file ")), texts, max_size=4)
digests = st.lists(st.binary(min_size=32, max_size=32), max_size=3)


def test_order_of_files_counts() -> None:
    ingredients = Ingredients({"a": "b"}, ())
    assert combine(ingredients, [ONE, TWO]) != combine(ingredients, [TWO, ONE])
    assert combine(ingredients, [ONE]) != combine(ingredients, [ONE, ONE])


def test_order_of_fields_doesnt_count() -> None:
    assert combine(Ingredients({"a": "1", "b": "2"}, ()), [ONE]) == combine(Ingredients({"b": "2", "a": "1"}, ()), [ONE])


def test_names_of_files_dont_count() -> None:
    assert combine(Ingredients({}, ("/a/x",)), [ONE]) == combine(Ingredients({}, ("/b/y",)), [ONE])


@given(fields, digests, fields, digests)
@settings(deadline=None, max_examples=200)
def test_no_two_identities_share_a_fingerprint(
    fields_a: dict[str, str], digests_a: list[bytes], fields_b: dict[str, str], digests_b: list[bytes]
) -> None:
    same = (fields_a, digests_a) == (fields_b, digests_b)
    assert (combine(Ingredients(fields_a, ()), digests_a) == combine(Ingredients(fields_b, ()), digests_b)) == same


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"ab": "c"}, {"a": "bc"}),
        ({"a": "b", "c": "d"}, {"a": "b\0c\0d"}),
        ({"a": ""}, {}),
        ({"a": "1"}, {"a": "1.0"}),
        ({"": "a"}, {"a": ""}),
    ],
)
def test_values_cant_move_between_fields(a: dict[str, str], b: dict[str, str]) -> None:
    assert combine(Ingredients(a, ()), [ONE]) != combine(Ingredients(b, ()), [ONE])


def test_released_fingerprints_stay_what_they_are() -> None:
    # Another value here makes every stored state of every user unreachable.
    hasher = blake3(derive_key_context=fingerprint.PURPOSE)
    for part in (b"n_layer", b"2", b"file 0", ONE):
        hasher.update(len(part).to_bytes(8, "little") + part)
    assert combine(Ingredients({"n_layer": "2"}, ("model.gguf",)), [ONE]) == hasher.digest()


# -- identification -----------------------------------------------------------------------------------------------------


def test_content_decides_and_not_the_name(repository: Repository, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "renamed.gguf"
    other.write_bytes(model.read_bytes())
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(b"Weights of a model")
    assert identified(repository, model) == identified(repository, other) != identified(repository, changed)


def test_every_file_counts(repository: Repository, model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "lora.gguf"
    adapter.write_bytes(b"adapter")
    found = {identified(repository, *files) for files in ((model,), (model, adapter), (adapter, model), (adapter,), ())}
    assert len(found) == 5


def test_settings_count(repository: Repository, model: Path) -> None:
    assert identified(repository, model, rope="1") != identified(repository, model, rope="2")


def test_small_files_are_hashed_while_the_caller_waits(repository: Repository, model: Path) -> None:
    _, outcome = identify(repository, model)
    assert outcome.threads == [threading.current_thread().name]


def test_digest_is_remembered(repository: Repository, model: Path, hashed: list[str]) -> None:
    first = identified(repository, model)
    assert identified(repository, model) == first
    assert hashed == ["model.gguf"]


def test_link_to_a_known_file_is_a_known_file(repository: Repository, model: Path, tmp_path: Path, hashed: list[str]) -> None:
    (tmp_path / "link.gguf").symlink_to(model)
    assert identified(repository, model) == identified(repository, tmp_path / "link.gguf")
    assert hashed == ["model.gguf"]


def test_rewrite_of_the_same_size_with_its_old_mtime_is_noticed(repository: Repository, model: Path, hashed: list[str]) -> None:
    first = identified(repository, model)
    before = model.stat()
    model.write_bytes(model.read_bytes().upper())
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert model.stat().st_mtime_ns == before.st_mtime_ns
    assert identified(repository, model) != first
    assert len(hashed) == 2


@pytest.mark.parametrize("at_once", [1 << 30, -1])
def test_file_that_is_replaced_while_it_is_read_identifies_nothing(
    repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """llama.cpp has loaded the old one: its states must not be kept as those of the new one."""
    original = fingerprint.digest_file

    def digest_file(path: str, **options: Any) -> bytes:
        newer = model.with_name("newer.gguf")
        newer.write_bytes(b"an update of the weights")
        newer.replace(model)
        return original(path, **options)

    monkeypatch.setattr(fingerprint, "HASH_AT_ONCE_BYTES", at_once)
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "digest_file", digest_file)
        identification, outcome = identify(repository, model)
        identification.wait()
    assert outcome.ready == []
    assert [type(error) for error in outcome.failed] == [NotIdentified]
    assert identified(repository, model) == combine(Ingredients({}, ()), [blake3(model.read_bytes()).digest()])


def test_large_file_is_hashed_behind(repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "HASH_AT_ONCE_BYTES", 0)
    original = fingerprint.digest_file
    go = threading.Event()

    def digest_file(path: str, **options: Callable[[int], None]) -> bytes:
        assert go.wait(LONG)
        return original(path, **options)

    monkeypatch.setattr(fingerprint, "digest_file", digest_file)
    identification, outcome = identify(repository, model)
    assert outcome.ready == []
    go.set()
    identification.wait()
    assert outcome.threads == ["kvkeep-identify"]
    assert outcome.ready == [combine(Ingredients({}, ()), [blake3(model.read_bytes()).digest()])]


def test_large_file_that_is_known_is_identified_at_once(
    repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    first = identified(repository, model)
    monkeypatch.setattr(fingerprint, "HASH_AT_ONCE_BYTES", 0)
    _, outcome = identify(repository, model)
    assert outcome.ready == [first]
    assert outcome.threads == [threading.current_thread().name]
    assert len(hashed) == 1


def test_stopped_identification_reports_nothing(repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "HASH_AT_ONCE_BYTES", 0)
    started, stopped = threading.Event(), threading.Event()

    def digest_file(_: str, *, progress: Callable[[int], None], in_parallel: bool) -> bytes:
        started.set()
        assert stopped.wait(LONG)
        progress(1)
        raise AssertionError("progress should have stopped it")

    monkeypatch.setattr(fingerprint, "digest_file", digest_file)
    identification, outcome = identify(repository, model)
    assert started.wait(LONG)
    monkeypatch.setattr(identification._stop, "set", lambda s=identification._stop.set: (s(), stopped.set()))
    identification.stop()
    identification.wait()
    assert (outcome.ready, outcome.failed) == ([], [])


@pytest.mark.parametrize("at_once", [1 << 30, -1])
def test_missing_file_is_reported(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(fingerprint, "HASH_AT_ONCE_BYTES", at_once)
    identification, outcome = identify(repository, tmp_path / "nowhere.gguf")
    identification.wait()
    assert outcome.ready == []
    assert [type(error) for error in outcome.failed] == [FileNotFoundError]


def test_digest_that_cant_be_remembered_is_still_good(
    repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> None:
        raise StoreLocked("busy")

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint.digests, "put", locked)
        found = identified(repository, model)
    assert identified(repository, model) == found
