"""The ways to keep a model's states, each with the same verbs. Used in the processes that measure."""

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from kvkeep.cache.adapters.loading import llama_library

NO_CACHE, ATTACH, RAM_CACHE, SEQUENCE_FILE = "no cache", "kvkeep attach", "stock LlamaRAMCache", "sequence file"


class Way:
    """No cache: what llama-cpp-python does by itself, which goes on with what the context still holds.

    Args:
        llm: the model.
        folder: where states are kept; it exists.
    """

    def __init__(self, llm: Any, folder: Path) -> None:
        self._llm = llm
        self._folder = folder

    def before(self, chat: str) -> None:
        """Before a prompt of this chat. The person waits for it."""

    def after(self, chat: str) -> None:
        """Behind an answer in this chat, in the thread that gave it."""

    def without_storing(self) -> AbstractContextManager[None]:
        """Nothing that is decoded in a `with` block is kept: the next repetition must find what this one has found."""
        return nullcontext()

    def settle(self) -> None:
        """Wait for what is done behind: a person takes longer for the next question."""

    def close(self) -> None:
        """The program ends."""

    @property
    def said(self) -> str:
        """What it says itself about the last prompt."""
        return ""


class Attach(Way):
    """Restores whatever can be restored, also where that is slower: from which length on it pays is what is to be found out."""

    def __init__(self, llm: Any, folder: Path) -> None:
        from kvkeep.cache import attach

        super().__init__(llm, folder)
        self._keep = attach(llm, folder, break_even=False)

    def without_storing(self) -> AbstractContextManager[None]:
        return self._keep.no_store()

    def settle(self) -> None:
        self._keep.flush()

    def close(self) -> None:
        self._keep.close()

    @property
    def said(self) -> str:
        return str(self._keep.last)


class DiskCache(Way):
    def __init__(self, llm: Any, folder: Path) -> None:
        from kvkeep.cache import LlamaDiskCache

        super().__init__(llm, folder)
        self._cache = LlamaDiskCache(folder)
        llm.set_cache(self._cache)

    def settle(self) -> None:
        self._cache.flush()

    def close(self) -> None:
        self._cache.close()


class StockDiskCache(Way):
    def __init__(self, llm: Any, folder: Path) -> None:
        super().__init__(llm, folder)
        self._cache = llama_library().llama_cache.LlamaDiskCache(str(folder))
        llm.set_cache(self._cache)

    def close(self) -> None:
        self._cache.cache.close()


class StockRAMCache(Way):
    def __init__(self, llm: Any, folder: Path) -> None:
        super().__init__(llm, folder)
        llm.set_cache(llama_library().llama_cache.LlamaRAMCache())


class SequenceFile(Way):
    """llama.cpp's own file of one sequence, one for each chat: written behind each answer, loaded where the chat isn't live."""

    def __init__(self, llm: Any, folder: Path) -> None:
        super().__init__(llm, folder)
        self._live = ""

    def before(self, chat: str) -> None:
        if self._live != chat and self._file(chat).exists():
            load_sequence(self._llm, self._file(chat))
        self._live = chat

    def after(self, chat: str) -> None:
        save_sequence(self._llm, self._file(chat))

    def _file(self, chat: str) -> Path:
        return self._folder / f"{chat.replace(' ', '-')}.seq"


WAYS: dict[str, type[Way]] = {
    NO_CACHE: Way,
    ATTACH: Attach,
    "kvkeep LlamaDiskCache": DiskCache,
    "stock LlamaDiskCache": StockDiskCache,
    RAM_CACHE: StockRAMCache,
    SEQUENCE_FILE: SequenceFile,
}


def keeps_on_disk(way: str) -> bool:
    """Whether a way writes anything."""
    return way not in (NO_CACHE, RAM_CACHE)


def save_sequence(llm: Any, path: Path) -> None:
    """Write the context's sequence and its tokens into a file of llama.cpp.

    Raises:
        OSError: it wasn't written.
    """
    library = llama_library()
    count = llm.n_tokens
    tokens = (library.llama_token * count)(*llm.input_ids[:count].tolist())
    if not library.llama_state_seq_save_file(llm.ctx, os.fsencode(path), 0, tokens, count):
        raise OSError(f"llama.cpp didn't write {path.name}")


def load_sequence(llm: Any, path: Path) -> None:
    """Have the context hold what such a file holds, and the `Llama` know it.

    Raises:
        OSError: it wasn't read.
    """
    library = llama_library()
    room = llm.n_ctx()
    tokens, count = (library.llama_token * room)(), ctypes.c_size_t(0)
    if not library.llama_state_seq_load_file(llm.ctx, os.fsencode(path), 0, tokens, room, ctypes.byref(count)):
        raise OSError(f"llama.cpp didn't read {path.name}")
    llm.input_ids[: count.value] = tokens[: count.value]
    llm.n_tokens = count.value
