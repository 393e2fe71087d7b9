"""States as other programs leave them: the stock cache's folder, files of llama.cpp, and pickles by hand."""

import contextlib
import io
import pickle  # noqa: TID251 - written here, never read
import pickletools
import sqlite3
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import llamas
import numpy as np
from llama_cpp.llama import LlamaState
from llama_cpp.llama_cache import LlamaDiskCache

SEQUENCE_MAGIC, SESSION_MAGIC = 0x67677371, 0x6767736E


class KeepingDiskCache(LlamaDiskCache):
    """As a fork has it: reading doesn't remove what is read. Every prompt shares the first token with any other."""

    def __getitem__(self, key: Sequence[int]) -> Any:
        found = self._find_longest_prefix_key(tuple(key))
        if found is None:
            raise KeyError(key)
        return self.cache[found]


def stock_folder(path: Path, model: str, chats: Sequence[Sequence[str]], *, keeping: bool = True, **options: Any) -> Path:
    """A folder that `LlamaDiskCache` itself has written: each chat is a list of user turns."""
    llm = llamas.load(model, **options)
    cache = (KeepingDiskCache if keeping else LlamaDiskCache)(str(path))
    llm.set_cache(cache)
    for turns in chats:
        messages: list[Any] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            with contextlib.redirect_stderr(io.StringIO()):
                answer: Any = llm.create_chat_completion(messages, max_tokens=6, temperature=0.0)
            messages.append(answer["choices"][0]["message"])
    cache.cache.close()
    llm.close()
    return path


def put_in_stock_folder(path: Path, key: Any, value: Any, **options: Any) -> None:
    """One more item in such a folder, through diskcache."""
    import diskcache

    with diskcache.Cache(str(path), **options) as cache:
        cache[key] = value


def stock_rows(path: Path) -> list[tuple[Any, ...]]:
    """Row id, key, file name and inline value of all items."""
    with contextlib.closing(sqlite3.connect(path / "cache.db")) as database:
        return database.execute("SELECT rowid, key, filename, value FROM Cache ORDER BY rowid").fetchall()


def change_row(path: Path, row: int, **values: Any) -> None:
    """Overwrite columns of a row."""
    with contextlib.closing(sqlite3.connect(path / "cache.db", isolation_level=None)) as database:
        for name, value in values.items():
            database.execute(f"UPDATE Cache SET {name} = ? WHERE rowid = ?", (value, row))


def add_row(path: Path, key: Sequence[int], value: bytes) -> None:
    """A row with any bytes for a pickled value."""
    pickled = pickletools.optimize(pickle.dumps(tuple(key), 5))
    with contextlib.closing(sqlite3.connect(path / "cache.db", isolation_level=None)) as database:
        database.execute("INSERT INTO Cache (key, raw, mode, value) VALUES (?, 0, 4, ?)", (pickled, value))


def save_sequence(llm: Any, path: Path, tokens: Sequence[int]) -> Path:
    """`llama_state_seq_save_file`."""
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    assert llama_cpp.llama_state_seq_save_file(llm.ctx, str(path).encode(), 0, array, len(tokens))
    return path


def save_session(llm: Any, path: Path, tokens: Sequence[int]) -> Path:
    """`llama_state_save_file`."""
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    assert llama_cpp.llama_state_save_file(llm.ctx, str(path).encode(), array, len(tokens))
    return path


def saved_by_llama_cpp(
    path: Path, kind: str, model: str, tokens: Sequence[int], spare: Sequence[int] = (), **options: Any
) -> Path:
    """A file that llama.cpp has written after these tokens; it names those of `spare` as well."""
    llm = llamas.load(model, **options)
    llm.eval(list(tokens))
    save = {"sequence": save_sequence, "session": save_session}[kind]
    save(llm, path, [*tokens, *spare])
    llm.close()
    return path


def saved_slot(path: Path, model: str, tokens: Sequence[int], *, unified: bool, slot: int = 1, n_slots: int = 3) -> Path:
    """What llama-server saves of one of its slots, while another one is in use."""
    llm = llamas.load(model, n_ctx=64)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = 1024 * n_slots, 512, n_slots
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = unified
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    ctx = llama_cpp.llama_init_from_model(llm._model.model, params)
    batch = llama_cpp.llama_batch_init(512, 0, 1)
    for seq_id, decoded in [(0, tokens[:20]), (slot, tokens)]:
        batch.n_tokens = len(decoded)
        for i, token in enumerate(decoded):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, 1, seq_id
            batch.logits[i] = i == len(decoded) - 1
        assert llama_cpp.llama_decode(ctx, batch) == 0
    packed = [-1, 1, len(tokens), *tokens, 0]
    array = (llama_cpp.llama_token * len(packed))(*packed)
    assert llama_cpp.llama_state_seq_save_file(ctx, str(path).encode(), slot, array, len(packed))
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(ctx)
    llm.close()
    return path


def state_file(
    path: Path, tokens: Sequence[int], state: bytes, magic: int = SEQUENCE_MAGIC, version: int = 3, count: int | None = None
) -> Path:
    """The same by hand."""
    head = struct.pack("<III", magic, version, len(tokens) if count is None else count)
    path.write_bytes(head + np.asarray(tokens, "<i4").tobytes() + state)
    return path


def small_state(n_tokens: int = 3, state: bytes = b"state", n_ctx: int = 8) -> LlamaState:
    """A `LlamaState` that no model has written."""
    ids = np.arange(3, 3 + n_ctx, dtype=np.intc)
    scores = np.zeros((2, 5), np.single)
    return LlamaState(ids, scores, n_tokens, state, len(state), 7)
