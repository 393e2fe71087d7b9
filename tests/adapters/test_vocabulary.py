"""Which file a namespace's model was, and its tokens as text."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import llamas
import numpy as np
import pytest

from kvkeep.cache import attach
from kvkeep.cache.adapters.vocabulary import Vocabulary, find_file
from kvkeep.store.digests import FileStamp, put
from kvkeep.store.errors import UsageError
from kvkeep.store.hashing import Fingerprint
from kvkeep.store.namespaces import usage
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository


@pytest.fixture
def model(tmp_path: Path, dense: str) -> str:
    """A model file that a test may move, touch and remove."""
    return str(shutil.copy(dense, tmp_path / "model.gguf"))


@pytest.fixture
def repository(root: Path, model: str) -> Iterator[Repository]:
    """A store that this model has filled."""
    llm = llamas.load(model)
    with attach(llm, root):
        llamas.generate(llm, llamas.random_tokens(70), 2)
    llm.close()
    opened = open_root(root)
    yield opened
    close_root(opened)


def found(repository: Repository) -> str | None:
    with repository.rows() as connection:
        [space] = usage(connection)
        return find_file(connection, space.fingerprint, space.ingredients)


def as_bytes(tokens: list[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def test_the_file_is_found_by_its_fingerprint(repository: Repository, model: str) -> None:
    assert found(repository) == model


def test_other_files_beside_it_are_told_apart(repository: Repository, model: str, other_dense: str) -> None:
    with repository.index.write() as connection:
        put(connection, FileStamp.of(other_dense), bytes(32))
    assert found(repository) == model


def test_other_settings_find_nothing(repository: Repository) -> None:
    with repository.rows() as connection:
        [space] = usage(connection)
        assert find_file(connection, Fingerprint(bytes(32)), space.ingredients) is None
        assert find_file(connection, space.fingerprint, space.ingredients | {"type_k": "8"}) is None
        assert find_file(connection, space.fingerprint, {}) is None


def test_a_file_that_has_changed_or_gone_is_not_used(repository: Repository, model: str) -> None:
    Path(model).write_bytes(Path(model).read_bytes() + b"more")
    assert found(repository) is None
    Path(model).unlink()
    assert found(repository) is None


def test_a_model_with_an_adapter_is_found(repository: Repository, model: str, other_dense: str) -> None:
    """The adapter's digest is remembered like any file's."""
    from kvkeep.cache.fingerprint import Ingredients, combine

    fields = {"lora_scale": "1.0"}
    with repository.index.write() as connection:
        put(connection, FileStamp.of(model), b"m" * 32)
        put(connection, FileStamp.of(other_dense), b"a" * 32)
        fingerprint = combine(Ingredients(fields, ()), [b"m" * 32, b"a" * 32])
        assert find_file(connection, fingerprint, fields) == model


def test_text_is_what_was_tokenised(smollm2: str) -> None:
    text = "The capital of France is Paris.\nÄpfel & Birnen"
    llm = llamas.load(smollm2, vocab_only=True)
    tokens = llm.tokenize(text.encode(), add_bos=False)
    llm.close()
    with Vocabulary(smollm2) as vocabulary:
        assert vocabulary.text(as_bytes(tokens)) == text
        assert vocabulary.text(b"") == ""


def test_steering_tokens_are_left_out_and_foreign_ones_are_numbers(dense: str) -> None:
    with Vocabulary(dense) as vocabulary:
        assert vocabulary.text(as_bytes([1, 3 + ord("h"), 3 + ord("i"), 2])) == "hi"
        assert vocabulary.text(as_bytes([3 + ord("x"), 1_000_000, -1])).split() == ["x", "#1000000", "#-1"]


def test_half_a_letter_is_a_sign_and_no_error(dense: str) -> None:
    with Vocabulary(dense) as vocabulary:
        assert vocabulary.text(as_bytes([3 + 0xC3])) == "\ufffd"


def test_what_is_no_model_is_an_error_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UsageError, match="can't read the vocabulary"):
        Vocabulary(str(path))
    assert capfd.readouterr() == ("", "")


def test_closing_twice_is_fine(dense: str) -> None:
    vocabulary = Vocabulary(dense)
    vocabulary.close()
    vocabulary.close()
