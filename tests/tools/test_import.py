import json
import os
import pickle  # noqa: TID251 - written here, never read
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click.testing
import pytest
from foreign import put_in_stock_folder, saved_by_llama_cpp, small_state, stock_folder
from llamas import random_tokens
from restart import SUPPORT, in_new_process

from kvkeep.cache.foreign import llama_files
from kvkeep.cache.foreign.taking import Taker
from kvkeep.store.errors import DiskFull, TooLarge
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.space import Disk

from .conftest import Kvkeep, held_by, listed, opened

TOKENS = random_tokens(130)
OTHERS = random_tokens(100, seed=3)
MORE = random_tokens(9, seed=5)


@pytest.fixture
def stock(dense: str, tmp_path: Path) -> Path:
    """A chat of two turns and another one, as the stock cache has written them."""
    return stock_folder(tmp_path / "stock", dense, [["hello there, " * 5, "what next?"], ["something else"]])


@pytest.fixture
def slots(dense: str, tmp_path: Path) -> Path:
    """A folder of two state files, with a file and a folder that are something else."""
    folder = tmp_path / "slots"
    folder.mkdir()
    saved_by_llama_cpp(folder / "slot-1.bin", "sequence", dense, TOKENS)
    saved_by_llama_cpp(folder / "prompt.cache", "session", dense, OTHERS)
    (folder / "notes.txt").write_text("no state")
    (folder / "deeper").mkdir()
    return folder


def answer(result: click.testing.Result, exit_code: int = 0) -> dict[str, Any]:
    assert result.exit_code == exit_code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def decoded(model: str, root: Path, tokens: list[int]) -> int:
    (found,) = in_new_process(model, root, [tokens + MORE])
    return int(found["decoded"])


def test_everything_at_once(kvkeep: Kvkeep, dense: str, stock: Path, slots: Path, root: Path) -> None:
    result = kvkeep("import", stock, slots, "--model", dense, "--path", root)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == f"Cache folder: {root}"
    assert any(line.startswith(f"  {slots / 'slot-1.bin'}: 130 tokens, ") and line.endswith(" KiB new") for line in lines)
    # The first turn of the chat is the beginning of the second one.
    assert sum(line.endswith("tokens, already stored") for line in lines) == 1
    assert "Imported: 4, " in lines[-2]
    assert lines[-2].endswith(" Already stored: 1. Refused: 0.")
    assert lines[-1] == "1 file in these folders is no state."
    for tokens in (TOKENS, OTHERS):
        assert decoded(dense, root, tokens) == len(MORE)
    again = kvkeep("import", stock, slots, "--model", dense, "--path", root)
    assert again.exit_code == 0
    assert "Imported: 0, 0 bytes. Already stored: 5. Refused: 0." in again.output


def test_in_json(kvkeep: Kvkeep, dense: str, slots: Path, root: Path) -> None:
    arguments = ("import", slots, "--model", dense, "--path", root, "--json")
    found = answer(kvkeep(*arguments))
    assert list(found) == ["path", "dry_run", "items", "totals", "warning"]
    assert [Path(item["name"]).name for item in found["items"]] == ["slot-1.bin", "prompt.cache"]
    assert [item["tokens"] for item in found["items"]] == [130, 100]
    assert all(item["is_new"] and item["written_bytes"] > 0 and item["error"] is None for item in found["items"])
    written = sum(item["written_bytes"] for item in found["items"])
    assert found["totals"] == {
        "imported": 2,
        "already_stored": 0,
        "refused": 0,
        "not_tried": 0,
        "other_files": 1,
        "tokens": 230,
        "written_bytes": written,
        "evicted": 0,
    }
    again = answer(kvkeep(*arguments))
    assert not any(item["is_new"] for item in again["items"])
    assert again["totals"]["written_bytes"] == 0


def test_pins(kvkeep: Kvkeep, dense: str, slots: Path, root: Path) -> None:
    assert kvkeep("import", slots, "--model", dense, "--path", root, "--pin").exit_code == 0
    pins = json.loads(kvkeep("pin", "--list", "--path", root, "--json").stdout)["pins"]
    assert sorted(pin["tokens"] for pin in pins) == [100, 130]
    assert all(prefix["pinned"] for prefix in listed(kvkeep, root))


def test_settings_decide_whose_they_are(kvkeep: Kvkeep, dense: str, tmp_path: Path, root: Path) -> None:
    options = {"flash_attn": True, "type_k": 8, "type_v": 8}
    path = saved_by_llama_cpp(tmp_path / "file", "sequence", dense, TOKENS, **options)
    arguments = ("import", path, "--model", dense, "--path", root)
    refused = kvkeep(*arguments)
    assert refused.exit_code == 41
    assert "other settings: flash attention was on, and is off for this model" in refused.output
    half = kvkeep(*arguments, "--set", "flash_attn=true")
    assert half.exit_code == 41
    assert "written with other settings" in half.output
    taken = kvkeep(*arguments, "--set", "flash_attn=true", "--set", "type_k=q8_0", "--set", "type_v=q8_0")
    assert taken.exit_code == 0, taken.output
    (warm,) = in_new_process(dense, root, [TOKENS + MORE], options=options)
    assert warm["decoded"] == len(MORE)


# -- a dry run ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_makes_no_folder(kvkeep: Kvkeep, dense: str, stock: Path, slots: Path, root: Path) -> None:
    before = sorted(stock.rglob("*"))
    result = kvkeep("import", stock, slots, "--model", dense, "--path", root, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "Could be imported: 5. Already stored: 0. Refused: 0." in result.output
    assert not root.exists()
    assert sorted(stock.rglob("*")) == before


def test_a_dry_run_writes_nothing(kvkeep: Kvkeep, dense: str, slots: Path, root: Path, tmp_path: Path) -> None:
    arguments = ("--model", dense, "--path", root, "--json")
    answer(kvkeep("import", slots / "slot-1.bin", *arguments))
    (tmp_path / "wrong").write_bytes((slots / "slot-1.bin").read_bytes()[:-1])
    before = held_by(root)
    found = answer(kvkeep("import", slots, tmp_path / "wrong", *arguments, "--dry-run"), exit_code=42)
    assert held_by(root) == before
    state = {Path(item["name"]).name: (item["is_new"], item["exit_code"]) for item in found["items"]}
    assert state == {"slot-1.bin": (False, 0), "prompt.cache": (True, 0), "wrong": (False, 42)}


# -- what can't be taken -----------------------------------------------------------------------------------------------


def test_a_model_is_needed(kvkeep: Kvkeep, slots: Path, root: Path) -> None:
    result = kvkeep("import", slots, "--path", root)
    assert result.exit_code == 2
    assert "doesn't say whose state it is: --model FILE.gguf names the model" in result.output
    assert not root.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "missing.gguf"), "does not exist"),
        (("--model", "{slots}"), "is a folder"),
        (("--model", "{dense}", "--set", "nonsense=1"), "no setting 'nonsense'"),
        (("--model", "{dense}", "--set", "n_ctx"), "has no ="),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], words: str, kvkeep: Kvkeep, dense: str, slots: Path, root: Path) -> None:
    result = kvkeep("import", slots, "--path", root, *(given.format(slots=slots, dense=dense) for given in arguments))
    assert result.exit_code == 2
    assert words in result.output
    assert not root.exists()


def test_paths_that_hold_nothing(kvkeep: Kvkeep, root: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no state")
    (tmp_path / "empty").mkdir()
    for path, exit_code, words in [
        (tmp_path / "missing", 2, "does not exist"),
        (tmp_path / "text", 41, "is no state that can be imported"),
        (tmp_path / "empty", 2, "holds nothing to import"),
    ]:
        result = kvkeep("import", path, "--path", root)
        assert result.exit_code == exit_code
        assert words in result.output
    assert not root.exists()
    assert kvkeep("import").exit_code == 2


def test_an_error_of_one_item_does_not_keep_the_others_out(kvkeep: Kvkeep, dense: str, slots: Path, root: Path) -> None:
    original = (slots / "slot-1.bin").read_bytes()
    (slots / "larger.bin").write_bytes(original + bytes(100))
    (slots / "version.bin").write_bytes(original[:4] + b"\x09\0\0\0" + original[8:])
    found = answer(kvkeep("import", slots, slots / "missing", "--model", dense, "--path", root, "--json"), exit_code=2)
    assert [(Path(item["name"]).name, item["exit_code"]) for item in found["items"]] == [
        ("missing", 2),
        ("larger.bin", 41),
        ("slot-1.bin", 0),
        ("version.bin", 41),
        ("prompt.cache", 0),
    ]
    assert found["totals"]["refused"] == 3
    assert decoded(dense, root, TOKENS) == len(MORE)


def test_a_state_of_another_model(kvkeep: Kvkeep, dense: str, hybrid: str, slots: Path, root: Path) -> None:
    result = kvkeep("import", slots, "--model", hybrid, "--path", root)
    assert result.exit_code in (41, 42)
    assert result.output.count("it is no state of a model with this memory (hybrid)") == 2
    assert "Imported: 0, 0 bytes. Already stored: 0. Refused: 2." in result.output
    assert listed(kvkeep, root) == []


def test_hostile_pickles_run_nothing(kvkeep: Kvkeep, dense: str, stock: Path, root: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"

    class Hostile:
        def __reduce__(self) -> object:
            return os.system, (f"touch {proof}",)

    put_in_stock_folder(stock, (1, 2), Hostile())
    put_in_stock_folder(stock, Hostile(), small_state())
    result = kvkeep("import", stock, "--model", dense, "--path", root)
    assert result.exit_code == 41
    assert result.output.count("the pickle asks for posix.system, which no saved state consists of; nothing of it was run") == 2
    assert "Refused: 2." in result.output
    assert not proof.exists()
    pickle.loads(pickle.dumps(Hostile()))  # noqa: S301 - the proof of the proof
    assert proof.exists()


def test_names_move_no_cursor(kvkeep: Kvkeep, dense: str, slots: Path, root: Path) -> None:
    (slots / "slot-1.bin").rename(slots / "a\x1b[31m\nb")
    result = kvkeep("import", slots, "--model", dense, "--path", root)
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "/a [31m b: 130 tokens" in result.output


# -- bundles -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(kvkeep: Kvkeep, dense: str, slots: Path, tmp_path: Path) -> Path:
    """What was imported elsewhere, exported."""
    first = tmp_path / "first"
    assert kvkeep("import", slots / "slot-1.bin", "--model", dense, "--path", first).exit_code == 0
    (prefix,) = listed(kvkeep, first)
    done = kvkeep("export", prefix["id"], "--to", tmp_path / "bundle", "--path", first)
    assert done.exit_code == 0, done.output
    return tmp_path / "bundle"


def test_a_bundle_needs_no_model(kvkeep: Kvkeep, dense: str, bundle: Path, root: Path) -> None:
    dry = answer(kvkeep("import", bundle, "--path", root, "--json", "--dry-run"))
    assert not root.exists()
    assert dry["items"][0]["tokens"] == 130
    found = answer(kvkeep("import", bundle, "--path", root, "--json"))
    assert (found["items"][0]["tokens"], found["items"][0]["is_new"]) == (130, True)
    assert found["totals"]["written_bytes"] > 0
    assert decoded(dense, root, TOKENS) == len(MORE)
    assert not answer(kvkeep("import", bundle, "--path", root, "--json"))["items"][0]["is_new"]


def test_a_dry_run_knows_what_is_stored_of_a_bundle(kvkeep: Kvkeep, bundle: Path, root: Path) -> None:
    for new, stored in ((1, 0), (0, 1)):
        totals = answer(kvkeep("import", bundle, "--path", root, "--dry-run", "--json"))["totals"]
        assert (totals["imported"], totals["already_stored"]) == (new, stored)
        answer(kvkeep("import", bundle, "--path", root, "--json"))


def test_a_bundle_together_with_states(kvkeep: Kvkeep, dense: str, bundle: Path, slots: Path, root: Path) -> None:
    bundle.rename(slots / "bundle")
    found = answer(kvkeep("import", slots, "--model", dense, "--path", root, "--json"))
    assert [Path(item["name"]).name for item in found["items"]] == ["slot-1.bin", "prompt.cache", "bundle"]
    assert [item["is_new"] for item in found["items"]] == [True, True, False]


def test_a_bundle_of_another_model(kvkeep: Kvkeep, other_dense: str, bundle: Path, root: Path) -> None:
    result = kvkeep("import", bundle, "--model", other_dense, "--path", root)
    assert result.exit_code == 41
    assert "it holds states of tiny, fingerprint " in result.output


def test_a_damaged_bundle(kvkeep: Kvkeep, bundle: Path, root: Path) -> None:
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bundle.write_bytes(data)
    result = kvkeep("import", bundle, "--path", root)
    assert 30 <= result.exit_code < 40
    assert "Refused: 1." in result.output


# -- room and interruptions --------------------------------------------------------------------------------------------


def test_a_full_disk_ends_it_and_says_what_was_taken(
    kvkeep: Kvkeep, dense: str, slots: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stored = Taker.store, []

    def full(self: Taker, *arguments: Any) -> Any:
        if stored:
            raise DiskFull("the disk is full")
        stored.append(1)
        return store(self, *arguments)

    monkeypatch.setattr(Taker, "store", full)
    saved_by_llama_cpp(slots / "third", "sequence", dense, OTHERS[:50])
    result = kvkeep("import", slots, "--model", dense, "--path", root)
    assert result.exit_code == 52
    assert "slot-1.bin: 130 tokens, " in result.output
    assert "prompt.cache: the disk is full" in result.output
    assert "Already stored: 0. Refused: 1." in result.output
    assert "Not tried any more: 1." in result.output
    found = answer(kvkeep("import", slots, "--model", dense, "--path", root, "--json"), exit_code=52)
    assert found["totals"]["not_tried"] >= 1


def test_what_had_to_go_again_is_said(kvkeep: Kvkeep, dense: str, tmp_path: Path, root: Path) -> None:
    for seed in range(3):
        path = tmp_path / "many" / f"{seed}"
        path.parent.mkdir(exist_ok=True)
        saved_by_llama_cpp(path, "sequence", dense, random_tokens(3400, seed=seed), n_ctx=4096, n_batch=512, type_k=0, type_v=0)
    arguments = ("--model", dense, "--path", root, "--json", "--set", "type_k=f32", "--set", "type_v=f32")
    close_root(open_root(root, 16 << 20))
    dry = answer(kvkeep("import", path.parent, *arguments, "--dry-run"))
    assert "some of it would have to go again" in dry["warning"]
    found = answer(kvkeep("import", path.parent, *arguments))
    assert [item["gone"] for item in found["items"]] == [True, True, False]
    assert found["warning"].startswith("2 imported states had to go again, in whole or in part, for those that came after")


SLOW = """
import sys, time
from kvkeep.cache.foreign.taking import Taker
from kvkeep.tools.main import main
store, blocks = Taker.store, []
def slow(self, checked, pause):
    def paused():
        pause()
        blocks.append(1)
        if len(blocks) == 2:
            print("stored a block", file=sys.stderr, flush=True)
            time.sleep(600)
    return store(self, checked, paused)
Taker.store = slow
main(sys.argv[1:], prog_name="kvkeep")
"""


def test_ctrl_c_leaves_a_sound_store(dense: str, slots: Path, root: Path, kvkeep: Callable[..., Any]) -> None:
    command = [sys.executable, "-c", SLOW, "import", str(slots), "--model", dense, "--path", str(root)]
    environment = os.environ | {"PYTHONPATH": str(SUPPORT)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("stored a block"):
            break
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Not tried any more: 1." in output
    with opened(root) as repository:
        assert repository.recovered == []
    assert kvkeep("verify", "--path", root).exit_code == 0
    assert kvkeep("import", slots, "--model", dense, "--path", root).exit_code == 0
    assert decoded(dense, root, TOKENS) == len(MORE)


@pytest.mark.parametrize(
    ("arguments", "why"), [(("",), "an empty text is none"), (("folder", "--set", "n_ctx=9"), "--set is about the model")]
)
def test_arguments_that_would_be_taken_for_something_else(
    arguments: tuple[str, ...], why: str, kvkeep: Kvkeep, root: Path
) -> None:
    """An unset variable of a shell would import the present folder; a setting without its model would be ignored."""
    result = kvkeep("import", *arguments, "--path", root)
    assert result.exit_code == 2
    assert why in result.output


def test_names_that_are_no_text(process: Callable[..., Any], dense: str, root: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    stock_folder(tmp_path / "stock", dense, [["hello there, " * 5]])
    os.rename(tmp_path / "stock", folder)
    done = process("import", folder, "--model", dense, "--path", root)
    assert done.returncode == 0, done.stderr
    assert "Imported: 1" in done.stdout


def test_one_name_that_is_no_text_costs_its_own_row_only(kvkeep: Kvkeep, dense: str, stock: Path, root: Path) -> None:
    put_in_stock_folder(stock, (1, 2, 3), small_state())
    with closing(sqlite3.connect(stock / "cache.db")) as connection, connection:
        last = "rowid = (SELECT max(rowid) FROM Cache)"
        connection.execute(f"UPDATE Cache SET value = NULL, filename = CAST(x'fffe' AS TEXT) WHERE {last}")
    found = answer(kvkeep("import", stock, "--model", dense, "--path", root, "--json"), 2)
    assert found["totals"]["refused"] == 1
    assert found["totals"]["imported"] + found["totals"]["already_stored"] == 3


def test_what_does_not_fit_into_memory_is_refused_alone(
    kvkeep: Kvkeep, dense: str, slots: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, limit = llama_files._state, (slots / "prompt.cache").stat().st_size

    def crowded(file: Any, kind: Any, n_bytes: int) -> Any:
        if n_bytes > limit:
            raise MemoryError
        return read(file, kind, n_bytes)

    monkeypatch.setattr(llama_files, "_state", crowded)
    found = answer(kvkeep("import", slots, "--model", dense, "--path", root, "--json"), TooLarge.exit_code)
    assert found["totals"]["refused"] == 1
    assert found["totals"]["imported"] == 1


def test_what_ended_it_gives_the_exit_code(
    kvkeep: Kvkeep, dense: str, hybrid: str, slots: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though something else was refused before."""
    saved_by_llama_cpp(slots / "a-large-one.bin", "sequence", hybrid, TOKENS * 2)

    def full(*_: Any, **__: Any) -> Any:
        raise DiskFull("no room")

    monkeypatch.setattr(Taker, "store", full)
    found = answer(kvkeep("import", slots, "--model", dense, "--path", root, "--json"), DiskFull.exit_code)
    assert [item["exit_code"] == DiskFull.exit_code for item in found["items"]].count(True) == 1
    assert any(item["exit_code"] in (41, 42) for item in found["items"]) or found["totals"]["not_tried"] == 2


def test_a_dry_run_looks_at_the_disk(
    kvkeep: Kvkeep, dense: str, slots: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "of", classmethod(lambda cls, path: Disk(10**12, 1000)))
    found = answer(kvkeep("import", slots, "--model", dense, "--path", root, "--dry-run", "--json"))
    assert "the disk has 0 bytes besides what is left to others" in found["warning"]
