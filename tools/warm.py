"""`kvkeep warm`: what every chat will begin with, decoded and pinned before the first one."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from kvkeep.store.errors import UsageError
from kvkeep.tools.console import make_console
from kvkeep.tools.folder import opened
from kvkeep.tools.options import gguf_file, gguf_option, json_option, path_option, print_json, set_option
from kvkeep.tools.progress import count_progress
from kvkeep.tools.words import size

# Far above any context; keeps a device from being read for ever.
_MAX_BYTES = 64 << 20


@click.command()
@gguf_option
@click.option(
    "--prompt-file",
    metavar="FILE",
    required=True,
    help="The prompt, a text in UTF-8, without the end of its last line; - reads it from stdin.",
)
@click.option(
    "--chat", is_flag=True, help="The file is a system message: the model's chat format is put around it, as chats have it."
)
@set_option
@click.option("--no-pin", is_flag=True, help="Don't pin it: it may be evicted like anything else.")
@path_option
@json_option
def warm(
    model: str | None, prompt_file: str, chat: bool, settings: tuple[str, ...], no_pin: bool, path: Path, as_json: bool
) -> None:
    """Decode a prompt and keep it, without generating.

    Chats that begin with it are warm from the first one on. Name the settings that your program passes to Llama, where they
    change keys and values: states are shared only under the same ones. n_ctx isn't one of them, as long as it stays below
    what the model was trained with; without --set n_ctx it is made large enough for the prompt.
    """
    if model is None:
        raise UsageError("--model names the model, a GGUF file")
    file = gguf_file("--model", model)
    text = _text(prompt_file)
    from kvkeep.cache.adapters.loading import loaded_for
    from kvkeep.cache.adapters.settings import llama_settings

    with loaded_for(str(file), llama_settings(settings), lambda llm: _tokens(llm, text, chat)) as (llm, tokens):
        document = {"path": str(path), "model": str(file)} | _warm(llm, path, tokens, pin=not no_pin)
    if as_json:
        print_json(document)
    else:
        _say(document)


def _say(document: dict[str, Any]) -> None:
    console = make_console()
    console.print(f"Cache folder: {document['path']}", soft_wrap=True)
    there, new = document["restored_tokens"], document["decoded_tokens"]
    console.print(
        f"{document['tokens']:,} tokens of {document['label']}: {there:,} were there, {new:,} decoded.", soft_wrap=True
    )
    name = document["id"][:8]
    pinned = f"Pinned: it is never evicted; kvkeep unpin {name} ends that." if document["pinned"] else "Not pinned."
    console.print(f"{size(document['written_bytes'])} written. {pinned}", soft_wrap=True)
    if document["pinned"]:
        console.print(f"For another machine: kvkeep export {name} --to FILE --path {document['path']}", soft_wrap=True)


def _text(name: str) -> str:
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).expanduser().open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"--prompt-file names a text file; {name} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file names a text in UTF-8; {name} is none: byte {error.start} doesn't fit") from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{name} has more than {_MAX_BYTES} bytes; that is no prompt")
    # Editors put it there; with it the prompt would be another one.
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise UsageError(f"{name} is empty: there is nothing to be kept")
    return text


def _tokens(llm: Any, text: str, chat: bool) -> list[int]:
    if chat:
        from kvkeep.cache.adapters.beginnings import chat_beginning

        return chat_beginning(llm, text)
    return [int(token) for token in llm.tokenize(text.encode(), special=True)]


def _warm(llm: Any, path: Path, tokens: Sequence[int], *, pin: bool) -> dict[str, Any]:
    from kvkeep.cache.adapters.attach import attach
    from kvkeep.cache.adapters.identity import label_of

    # First, because an error of opening ends this, while a program would go on without a cache.
    with opened(path, create=True), attach(llm, path, break_even=False) as keep:
        with count_progress("Decoding", len(tokens)) as progress:
            match = keep.warm(tokens, progress)
        if pin:
            keep.pin(tokens)
        return {
            "id": keep.key_of(tokens).hex(),
            "label": label_of(llm),
            "tokens": len(tokens),
            "restored_tokens": match.length,
            "decoded_tokens": len(tokens) - match.length,
            "written_bytes": keep.stats().written_bytes,
            "pinned": pin,
        }
