"""How chats with a system message begin: the tokens that all of them share, whatever the person says."""

from collections.abc import Sequence
from typing import Any, NoReturn

from kvkeep.store.errors import UsageError

# No two of them begin with the same token in any usual vocabulary.
_FIRST_WORDS = ("a", "7", "Z", "\u00e9")
# Nobody's.
_OTHER_SYSTEM = "Count backwards from ninety in steps of seven."


class _Prompt(Exception):
    """The prompt that a chat would have been answered from."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(len(tokens))
        self.tokens = tokens


def chat_beginning(llm: Any, system: str) -> list[int]:
    """The tokens that every chat under a system message begins with, up to the person's first word.

    The model's own chat format puts them around the message, whichever it is: each chat is begun with the format's own code,
    and stopped where the completion would begin.

    Args:
        llm: a `llama_cpp.Llama`. Nothing is decoded.
        system: the system message.

    Raises:
        UsageError: the chat format can't do that, as where it knows no system messages.
    """
    found = _common([_prompt(llm, system, words) for words in _FIRST_WORDS])
    if _common([_prompt(llm, _OTHER_SYSTEM, words) for words in _FIRST_WORDS]) == found:
        raise UsageError("the model's chat format leaves system messages out")
    return found


def _common(prompts: Sequence[list[int]]) -> list[int]:
    length = 0
    for same in zip(*prompts, strict=False):
        if len(set(same)) > 1:
            break
        length += 1
    return prompts[0][:length]


def _prompt(llm: Any, system: str, words: str) -> list[int]:
    def caught(*given: Any, **named: Any) -> NoReturn:
        prompt = given[0] if given else named["prompt"]
        tokens = llm.tokenize(prompt.encode(), special=True) if isinstance(prompt, str) else prompt
        raise _Prompt([int(token) for token in tokens])

    messages = [{"role": "system", "content": system}, {"role": "user", "content": words}]
    before = llm.__dict__.get("create_completion")
    llm.create_completion = caught
    try:
        llm.create_chat_completion(messages=messages, max_tokens=1)
    except _Prompt as found:
        return found.tokens
    except Exception as error:  # a chat template is a program that somebody else wrote, and may fail in any way
        raise UsageError(f"the model's chat format can't begin a chat with a system message: {error}") from error
    finally:
        if before is None:
            del llm.create_completion
        else:
            llm.create_completion = before
    raise UsageError("the model's chat format answers without a prompt, so a chat can't be begun in advance")
