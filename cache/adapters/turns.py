"""Where the last user's turn begins in a prompt, found by the words with which the model's chat template begins one."""

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

_LOG = logging.getLogger("kvkeep")
# Stand in for what people and models say.
_FIRST, _ANSWER, _SECOND = "KvkeepFirst", "KvkeepAnswer", "KvkeepSecond"


class UserTurns:
    """The turns of one model's chat template.

    Args:
        llm: a `llama_cpp.Llama`; only its template and its vocabulary are used, and nothing of it is kept.
    """

    def __init__(self, llm: Any) -> None:
        self._header = _header_tokens(llm)

    def last(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> int | None:
        """Position of the first token of the last user's turn; None if the prompt shows none.

        A person can write the same words into a message: then it is just another place for a checkpoint.
        """
        length = len(self._header)
        if length == 0 or len(tokens) < length:
            return None
        views = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, np.int32), length)
        found = np.flatnonzero((views == self._header).all(axis=1))
        return int(found[-1]) if found.size else None


def _header_tokens(llm: Any) -> npt.NDArray[np.int32]:
    """The tokens with which a user's turn begins; none if the template shows no such words."""
    try:
        text = _header_text(llm)
        tokens = llm.tokenize(text.encode(), add_bos=False, special=True) if text else []
    except Exception as error:  # noqa: BLE001 - a template is a program that somebody else wrote
        _LOG.debug("the chat template shows no user's turn: %s", error)
        tokens = []
    return np.asarray(tokens, np.int32)


def _header_text(llm: Any) -> str:
    template = llm.metadata.get("tokenizer.chat_template")
    if not template:
        return ""
    messages: list[Any] = [
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    bos, eos = (llm._model.token_get_text(token) if token >= 0 else "" for token in (llm.token_bos(), llm.token_eos()))
    formatter = Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)
    prompt = formatter(messages=messages).prompt
    before_first = prompt.partition(_FIRST)[0]
    between = re.search(f"{_ANSWER}(.*){_SECOND}", prompt, re.DOTALL)
    if between is None:
        return ""
    # What the first turn has before it may be a system message, the second one the end of an answer: what both share
    # is the beginning of a turn. White space at its ends may belong to a token with what stands beside it.
    return _common_end(before_first, between[1]).strip()


def _common_end(a: str, b: str) -> str:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return a[len(a) - length :]
