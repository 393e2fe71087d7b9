"""`kvkeep warm`: what was decoded beforehand needn't be decoded in the first chat."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llamas import load, n_decoded, random_tokens

from kvkeep.cache import attach
from kvkeep.cache.adapters.beginnings import chat_beginning
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.errors import DiskFull, NotARoot, UsageError

from .conftest import Kvkeep

TEXT = " ".join(["The rules of this house are short and old and good to know."] * 12)


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def decoded(llm: Any, text: str) -> int:
    """Prompt tokens that a completion decodes."""
    before = n_decoded(llm)
    llm.create_completion(text, max_tokens=1, temperature=0.0)
    return n_decoded(llm) - before


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "recurrent"])
def test_a_prompt_that_goes_on_decodes_only_what_follows(
    kind: str, kvkeep: Kvkeep, prompt: Path, root: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    result = kvkeep("warm", "--model", model, "--prompt-file", prompt, "--path", root, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    llm = load(model)
    n_tokens = len(llm.tokenize(TEXT.encode(), special=True))
    assert (document["tokens"], document["restored_tokens"], document["pinned"]) == (n_tokens, 0, True)
    assert document["written_bytes"] > 0
    longer = llm.tokenize(TEXT.encode(), special=True) + random_tokens(9)
    with attach(llm, root, break_even=False):
        assert decoded(llm, longer) == 9
    pins = json.loads(kvkeep("pin", "--list", "--path", root, "--json").stdout)["pins"]
    assert [pin["tokens"] for pin in pins] == [n_tokens]


def test_again_it_writes_nothing(kvkeep: Kvkeep, prompt: Path, root: Path, dense: str) -> None:
    arguments = ("warm", "--model", dense, "--prompt-file", prompt, "--path", root)
    assert kvkeep(*arguments, "--no-pin").exit_code == 0
    assert json.loads(kvkeep("pin", "--list", "--path", root, "--json").stdout)["pins"] == []
    result = kvkeep(*arguments)
    assert result.exit_code == 0
    assert "1 decoded" in result.output
    assert "0 bytes written. Pinned" in result.output


def test_it_makes_room_for_a_long_prompt_and_refuses_one_that_a_given_context_has_none_for(
    kvkeep: Kvkeep, tmp_path: Path, root: Path, dense: str
) -> None:
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 6)
    result = kvkeep("warm", "--model", dense, "--prompt-file", long, "--path", root, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] > 512
    result = kvkeep("warm", "--model", dense, "--prompt-file", long, "--path", root, "--set", "n_ctx=256")
    assert result.exit_code == 2
    assert "the context has room for 256" in result.output


def test_settings_count(kvkeep: Kvkeep, prompt: Path, root: Path, dense: str) -> None:
    assert kvkeep("warm", "--model", dense, "--prompt-file", prompt, "--path", root, "--set", "flash_attn=true").exit_code == 0
    for options, reused in (({}, False), ({"flash_attn": True}, True)):
        llm = load(dense, **options)
        with attach(llm, root, break_even=False):
            assert (decoded(llm, TEXT) == 1) is reused


def test_from_stdin(process: Callable[..., Any], root: Path, dense: str) -> None:
    done = process("warm", "--model", dense, "--prompt-file", "-", "--path", root, "--json", input=TEXT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["decoded_tokens"] > 50


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "can't be read: No such file"),
        (b"", "is empty"),
        (b"abc\xff", "none: byte 3 doesn't fit"),
        ("folder", "Is a directory"),
    ],
)
def test_a_prompt_that_is_none(kvkeep: Kvkeep, tmp_path: Path, dense: str, content: Any, why: str) -> None:
    path = tmp_path / "prompt"
    if content == "folder":
        path.mkdir()
    elif content == "device":
        path = Path("/dev/zero")
    elif content is not None:
        path.write_bytes(content)
    result = kvkeep("warm", "--model", dense, "--prompt-file", path, "--path", tmp_path / "root")
    assert result.exit_code == 2
    assert why in result.output
    assert not (tmp_path / "root").exists()


def test_a_model_that_is_none(kvkeep: Kvkeep, prompt: Path, root: Path) -> None:
    assert "--model names the model" in kvkeep("warm", "--prompt-file", prompt, "--path", root).output
    result = kvkeep("warm", "--model", prompt, "--prompt-file", prompt, "--path", root)
    assert (result.exit_code, "names a GGUF file" in result.output) == (2, True)


def test_a_folder_that_cannot_be_used(kvkeep: Kvkeep, prompt: Path, tmp_path: Path, dense: str) -> None:
    file = tmp_path / "file"
    file.write_text("somebody's")
    result = kvkeep("warm", "--model", dense, "--prompt-file", prompt, "--path", file)
    assert result.exit_code == NotARoot.exit_code
    assert result.output == f"kvkeep: {file} is a file; a folder is needed\n"


def test_what_is_in_the_way_gives_the_exit_code(
    kvkeep: Kvkeep, prompt: Path, root: Path, dense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise DiskFull("no room")

    monkeypatch.setattr(PrefixCache, "save", full)
    result = kvkeep("warm", "--model", dense, "--prompt-file", prompt, "--path", root)
    assert result.exit_code == DiskFull.exit_code
    assert "tokens only 0 are stored: no room" in result.output


# -- chats ---------------------------------------------------------------------------------------------------------------


def test_every_chat_under_a_system_message_begins_so(kvkeep: Kvkeep, tmp_path: Path, root: Path, smollm2: str) -> None:
    system = tmp_path / "system.txt"
    system.write_text("You are Robin. Answer in one short sentence.")
    result = kvkeep("warm", "--model", smollm2, "--prompt-file", system, "--chat", "--path", root, "--json")
    assert result.exit_code == 0, result.output
    warmed = json.loads(result.stdout)["tokens"]
    llm = load(smollm2)
    with attach(llm, root, break_even=False) as keep:
        messages = [{"role": "system", "content": system.read_text()}, {"role": "user", "content": "Who are you?"}]
        llm.create_chat_completion(messages=messages, max_tokens=1)
        assert keep.last is not None
        assert keep.last.length == warmed
        assert keep.last.prompt_tokens > warmed
    llm.close()


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_the_end_of_the_last_line_is_no_part_of_it(end: str, kvkeep: Kvkeep, tmp_path: Path, root: Path, hybrid: str) -> None:
    """Editors put it there, and the program's message has none: a hybrid could restore nothing then."""
    path = tmp_path / "prompt.txt"
    path.write_bytes(TEXT.encode() + end.encode())
    assert kvkeep("warm", "--model", hybrid, "--prompt-file", path, "--path", root).exit_code == 0
    llm = load(hybrid)
    with attach(llm, root, break_even=False):
        assert decoded(llm, llm.tokenize(TEXT.encode(), special=True) + random_tokens(9)) == 9


def test_a_beginning_is_found_without_decoding(smollm2: str) -> None:
    llm = load(smollm2)
    tokens = chat_beginning(llm, "Be short.")
    assert llm.detokenize(tokens, special=True).decode() == "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n"
    assert n_decoded(llm) == 0
    assert "create_completion" not in llm.__dict__
    llm.close()


def test_a_chat_format_without_system_messages_is_said(kvkeep: Kvkeep, prompt: Path, dense: str, root: Path) -> None:
    arguments = ("--chat", "--set", "chat_format=gemma", "--prompt-file", prompt, "--path", root)
    result = kvkeep("warm", "--model", dense, *arguments)
    assert result.exit_code == 2
    assert "leaves system messages out" in result.output
    assert not root.exists()


def test_a_prompt_longer_than_the_model_was_trained_with(kvkeep: Kvkeep, tmp_path: Path, dense: str, root: Path) -> None:
    """Beyond that, states have another fingerprint, under which no usual program looks for them."""
    path = tmp_path / "long"
    path.write_text(TEXT * 100)
    result = kvkeep("warm", "--model", dense, "--prompt-file", path, "--path", root)
    assert result.exit_code == 2
    assert "was trained with 8192" in result.output


def test_a_chat_format_that_fails_is_said(dense: str) -> None:
    llm = load(dense)

    def broken(**_: Any) -> None:
        raise RuntimeError("no system messages")

    llm.chat_handler = broken
    with pytest.raises(UsageError, match=r"can't begin a chat.*no system messages"):
        chat_beginning(llm, "Be short.")
    llm.chat_handler = lambda **_: None
    with pytest.raises(UsageError, match="answers without a prompt"):
        chat_beginning(llm, "Be short.")
    llm.close()
