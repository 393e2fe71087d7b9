"""Somebody's script, with nothing but the import changed: the same answers, and never more to decode."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from restart import run_child

SCRIPT = """
import json, sys
import llamas
from {module} import {name}

model, step = sys.argv[1:3]
llm = llamas.load(model)
llm.set_cache({name}({arguments}))

def ask(prompt):
    before = llamas.n_decoded(llm)
    choice = llm.create_completion(prompt, max_tokens=8, temperature=0.0, logprobs=None)["choices"][0]
    return choice["text"], llamas.n_decoded(llm) - before

system = llamas.random_tokens(150)
questions = [llamas.random_tokens(30, seed=number) for number in range(1, 9)]
steps = []
chat = list(system)
if step == "first":
    for question in questions[:5]:
        chat += question
        steps.append(ask(chat))
        chat += llm.input_ids[len(chat) : llm.n_tokens].tolist()
    steps.append(ask([*system, *questions[5]]))
    steps.append(ask(chat))
else:
    chat = json.loads(sys.argv[3])
    steps.append(ask([*chat, *questions[6]]))
    steps.append(ask([*system, *questions[7]]))
    steps.append(ask([*chat, *questions[7]]))
llm.close()
print(json.dumps([chat, steps]))
"""

Steps = list[tuple[str, int]]


def run(module: str, name: str, arguments: str, model: str, *more: str) -> tuple[list[int], Steps]:
    script = SCRIPT.format(module=module, name=name, arguments=arguments)
    done: subprocess.CompletedProcess[str] = run_child(["-c", script, model, *more])
    assert done.returncode == 0, done.stderr[-3000:]
    chat, steps = json.loads(done.stdout.splitlines()[-1])
    return chat, [(text, decoded) for text, decoded in steps]


def lived(module: str, name: str, arguments: str, model: str) -> Steps:
    """A process, and the one after a restart."""
    chat, before = run(module, name, arguments, model, "first")
    _, after = run(module, name, arguments, model, "second", json.dumps(chat))
    return [*before, *after]


@pytest.fixture(scope="module")
def of_stock(dense: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    folder = tmp_path_factory.mktemp("stock")
    stock = "llama_cpp.llama_cache"
    return {
        "RAM": lived(stock, "LlamaRAMCache", "", dense),
        "disk": lived(stock, "LlamaDiskCache", repr(str(folder / "cache")), dense),
    }


@pytest.mark.parametrize("name", ["LlamaRAMCache", "LlamaTrieCache", "LlamaCache", "LlamaDiskCache"])
def test_one_import_is_all_that_changes(name: str, dense: str, root: Path, of_stock: dict[str, Steps]) -> None:
    ours = lived("kvkeep.cache", name, repr(str(root)) if name == "LlamaDiskCache" else "", dense)
    for stock in of_stock.values():
        assert [text for text, _ in ours] == [text for text, _ in stock]
        if name == "LlamaDiskCache":
            assert all(mine <= theirs for (_, mine), (_, theirs) in zip(ours, stock, strict=True)), (ours, stock)
    if name == "LlamaRAMCache":
        assert ours == of_stock["RAM"], "what it decodes, too"


def test_a_stock_folder_is_left_as_it_is(dense: str, tmp_path: Path) -> None:
    """Where the folder stays the same as well, what the stock class has put there is still there for it."""
    folder = tmp_path / "cache"
    chat, _ = run("llama_cpp.llama_cache", "LlamaDiskCache", repr(str(folder)), dense, "first")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    _, ours = run("kvkeep.cache", "LlamaDiskCache", repr(str(folder)), dense, "first")
    assert ours[-1][1] <= 9
    for path, content in before.items():
        assert path.read_bytes() == content
    _, stock = run("llama_cpp.llama_cache", "LlamaDiskCache", repr(str(folder)), dense, "second", json.dumps(chat))
    assert stock[0][1] < 50


def test_the_person_is_told_how_to_take_over_what_a_stock_folder_has(
    dense: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from kvkeep.cache import LlamaDiskCache

    folder = tmp_path / "cache"
    run("llama_cpp.llama_cache", "LlamaDiskCache", repr(str(folder)), dense, "first")
    cache: Any = LlamaDiskCache(folder)
    cache.close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"kvkeep import {folder} --path {folder} --model FILE takes them over;" in said
