"""What is handed to the cache, and what lies beside it: a format of its own, so nothing depends on what can be pickled."""

import ctypes
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import diskcache
import numpy as np
import pytest
from click.testing import CliRunner
from llama_cpp import LlamaState
from llamas import generate, load, random_tokens
from restart import run_child

from kvkeep.cache import LlamaDiskCache, LlamaRAMCache, LlamaTrieCache, attach
from kvkeep.tools.main import main

PROMPT = random_tokens(150)
OTHER = random_tokens(40, seed=3)

SCRIPT = """
import json, sys
from {module} import LlamaDiskCache
from llama_cpp import Llama

llm = Llama(sys.argv[1], n_ctx=1024, n_batch=128, n_threads=1, n_threads_batch=1, verbose=False)
llm.set_cache(LlamaDiskCache(sys.argv[2]))
texts = []
for prompt in json.loads(sys.argv[3]):
    texts.append(llm.create_completion(prompt, max_tokens=6, temperature=0.0)["choices"][0]["text"])
import os
print(json.dumps([texts, bool({own} & set(sys.modules))]))
"""
# Names that a person's own modules have, beside the script.
OWN = ("cache", "store", "tools", "migrations", "llama_cache", "serialiser")


def test_d8_two_requests_in_a_script_of_somebodys_own(dense: str, root: Path, tmp_path: Path) -> None:
    """The first request worked and the second one failed: a module's name clashed when the entry was read back, and only
    outside of the server (JamePeng/llama-cpp-python #89)."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in OWN:
        (folder / f"{name}.py").write_text("raise RuntimeError('the person\\'s own module')\n")
    script = folder / "chat.py"
    script.write_text(SCRIPT.format(module="kvkeep.cache", own=set(OWN)))
    prompts = [PROMPT, [*PROMPT, 5, 6], PROMPT]
    control = load(dense)
    expected = [control.create_completion(prompt, max_tokens=6, temperature=0.0)["choices"][0]["text"] for prompt in prompts]
    for _ in range(2):
        child = run_child([str(script), dense, str(root), json.dumps(prompts)], cwd=folder)
        assert child.returncode == 0, child.stderr[-3000:]
        assert "kvkeep" not in child.stderr
        assert json.loads(child.stdout) == [expected, False]


def with_ctypes(state: LlamaState) -> LlamaState:
    """As older releases had it: a ctypes array, which can't be pickled."""
    state.llama_state = (ctypes.c_uint8 * state.llama_state_size).from_buffer_copy(bytes(state.llama_state))
    return state


def with_a_longer_buffer(state: LlamaState) -> LlamaState:
    """As big as llama.cpp might need it, and filled only in part."""
    state.llama_state = bytes(state.llama_state) + bytes(1000)
    return state


def with_other_integers(state: LlamaState) -> LlamaState:
    state.input_ids = np.asarray(state.input_ids[: state.n_tokens], np.int64)
    return state


@pytest.mark.parametrize("change", [with_ctypes, with_a_longer_buffer, with_other_integers])
@pytest.mark.parametrize("name", ["LlamaDiskCache", "LlamaRAMCache", "LlamaTrieCache"])
def test_d8_states_of_every_make(name: str, change: Any, dense: str, root: Path) -> None:
    """ctypes objects can't be pickled, so no state could be stored (llama-cpp-python #363, PR #370)."""
    llm = load(dense)
    llm.eval(PROMPT)
    cache: Any = {"LlamaRAMCache": LlamaRAMCache, "LlamaTrieCache": LlamaTrieCache}.get(name, lambda: LlamaDiskCache(root))()
    for _ in range(2):
        cache[PROMPT] = change(llm.save_state())
        found = cache[[*PROMPT, 5]]
        other = load(dense)
        other.load_state(found)
        assert generate(other, [*PROMPT, 5], 6) == generate(load(dense), [*PROMPT, 5], 6)
    if name == "LlamaDiskCache":
        cache.close()


@pytest.mark.parametrize("name", ["LlamaDiskCache", "LlamaRAMCache", "LlamaTrieCache"])
def test_d8_something_that_is_no_state(name: str, dense: str, root: Path) -> None:
    """An entry that is None was found and used (llama-cpp-python #348), or a class that the reader doesn't know (mlx-examples
    #1360)."""
    cache: Any = {"LlamaRAMCache": LlamaRAMCache, "LlamaTrieCache": LlamaTrieCache}.get(name, lambda: LlamaDiskCache(root))()
    for value in (None, object(), b"bytes"):
        # Refused or dropped, as each class says; never found.
        with suppress(TypeError, AttributeError):
            cache[PROMPT] = value
        assert PROMPT not in cache
        with pytest.raises(KeyError):
            cache[PROMPT]
    llm = load(dense)
    llm.eval(PROMPT)
    cache[PROMPT] = llm.save_state()
    assert cache[PROMPT].n_tokens == len(PROMPT)
    if name == "LlamaDiskCache":
        cache.close()


def test_d8_an_old_folder_with_odd_entries(dense: str, root: Path, tmp_path: Path) -> None:
    """`diskcache.push` had put entries under numbers, and some entries were None (llama-cpp-python PR #370 and #348): what is
    good among them is taken over, and the rest is named."""
    llm = load(dense)
    llm.eval(PROMPT)
    with diskcache.Cache(str(tmp_path / "stock")) as stock:
        stock.push(llm.save_state())
        stock[tuple(OTHER)] = None
        stock[tuple(PROMPT)] = llm.save_state()
    arguments = ["import", str(tmp_path / "stock"), "--model", dense, "--path", str(root), "--set", "n_ctx=1024"]
    result = CliRunner().invoke(main, [*arguments, "--json"], prog_name="kvkeep")
    assert "Traceback" not in result.output
    again = load(dense)
    with attach(again, root, break_even=False) as keep:
        assert generate(again, [*PROMPT, 5], 4) == generate(load(dense), [*PROMPT, 5], 4)
        assert keep.last is not None
        assert keep.last.length == len(PROMPT), result.output
