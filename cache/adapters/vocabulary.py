"""Tokens as text: which model file on this machine is a namespace's own, and its vocabulary without its weights."""

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvkeep.cache.adapters.loading import llama_library
from kvkeep.cache.fingerprint import Ingredients, combine, model_files
from kvkeep.store import digests
from kvkeep.store.digests import FileStamp
from kvkeep.store.engine import Connection
from kvkeep.store.errors import UsageError
from kvkeep.store.hashing import Fingerprint

# How SentencePiece writes a space. llama.cpp leaves it as it is where a vocabulary has no token for it but single bytes.
_SPACE = "\u2581"
# Longer than any piece of a vocabulary that was ever seen; longer ones are asked for again.
_PIECE_BYTES = 128


def find_file(connection: Connection, fingerprint: Fingerprint, fields: dict[str, str]) -> str | None:
    """The model file that gave a namespace its fingerprint, if it is still where it was, and as it was.

    Args:
        connection: a read transaction.
        fingerprint: the namespace's.
        fields: its ingredients, which with the digests of its files make the fingerprint.
    """
    known = _unchanged(connection)
    for path in known:
        parts = model_files(path)
        if path != parts[0] or not all(part in known for part in parts):
            continue
        own = [known[part] for part in parts]
        # With an adapter any other file may be the one.
        candidates = [[*own, adapter] for adapter in known.values()] if "lora_scale" in fields else [own]
        if any(combine(Ingredients(fields, ()), found) == fingerprint for found in candidates):
            return path
    return None


def _unchanged(connection: Connection) -> dict[str, bytes]:
    """Digests of the model files that are remembered and still have the same stamp."""
    found: dict[str, bytes] = {}
    for path in digests.paths(connection):
        try:
            digest = digests.get(connection, FileStamp.of(path))
        except (OSError, ValueError):
            continue
        if digest is not None:
            found[path] = digest
    return found


class Vocabulary:
    """The vocabulary of a GGUF file, loaded without its weights. Close it, or use it as a context manager.

    Raises:
        UsageError: llama-cpp-python isn't there, or can't read the file.
    """

    def __init__(self, path: str) -> None:
        self._llama = llama_library()
        parameters = self._llama.llama_model_default_params()
        parameters.vocab_only = True
        with _silence():
            self._model = self._llama.llama_model_load_from_file(path.encode(errors="surrogateescape"), parameters)
        if not self._model:
            raise UsageError(f"llama.cpp can't read the vocabulary of {path}")
        self._vocab = self._llama.llama_model_get_vocab(self._model)
        self._size = int(self._llama.llama_vocab_n_tokens(self._vocab))

    def text(self, tokens: bytes) -> str:
        """Tokens as text, without the ones that only steer the model. What belongs to another vocabulary is `#1234`.

        Args:
            tokens: little-endian int32. A letter of which only a part is there becomes U+FFFD.
        """
        pieces = (self._piece(token) for token in np.frombuffer(tokens, "<i4").tolist())
        return b"".join(pieces).decode(errors="replace").replace(_SPACE, " ")

    def _piece(self, token: int) -> bytes:
        if not 0 <= token < self._size:
            return f" #{token} ".encode()
        room = _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(room)
            length = int(self._llama.llama_token_to_piece(self._vocab, token, buffer, room, 0, False))
            if length >= 0:
                return buffer.raw[:length]
            room = -length

    def close(self) -> None:
        """Give the memory back."""
        model, self._model = self._model, None
        if model:
            self._llama.llama_model_free(model)

    def __enter__(self) -> "Vocabulary":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@contextmanager
def _silence() -> Iterator[None]:
    """Nothing of llama.cpp on stderr: llama-cpp-python prints what this logger's level lets through."""
    logger = logging.getLogger("llama-cpp-python")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
