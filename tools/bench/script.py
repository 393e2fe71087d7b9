"""What is said in the chat of the bench: fixed tokens, also the answers, so that all ways do exactly the same work."""

from typing import Any

from kvkeep.tools.demo_prompt import WANTED_TOKENS, fitting_prompt

CHATS = ("mail of last week", "photos of the summer")
"""The chat that is looked at, and the other one."""

_QUESTION = "\nThe person says: please look after item {number} of my {chat}, and tell me what you have found.\nRobin says:"
_ANSWER = " I have looked for item {number}, and it is done."


def long_tokens(llm: Any, count: int) -> list[int]:
    """Exactly `count` tokens of text: an assistant's role, rules and tools, again and again under other headings."""
    # Counted as nothing it fits as a whole.
    text = fitting_prompt(lambda _text: 0, WANTED_TOKENS).text
    tokens: list[int] = []
    part = 0
    while len(tokens) < count:
        tokens += _tokens(llm, f"Part {part} of the handbook.\n{text}\n", first=part == 0)
        part += 1
    return tokens[:count]


def _tokens(llm: Any, text: str, *, first: bool = False) -> list[int]:
    return [int(token) for token in llm.tokenize(text.encode(), add_bos=first, special=False)]


class Script:
    """One chat under a system prompt, turn by turn.

    Args:
        llm: the model, for its vocabulary.
        system: tokens of the system prompt.
        chat: what this chat is about; chats part from each other behind the system prompt.
    """

    def __init__(self, llm: Any, system: list[int], chat: str) -> None:
        self._llm = llm
        self._system = system
        self._chat = chat

    def prompt(self, turn: int) -> list[int]:
        """The whole prompt of a turn; the first one is 0."""
        tokens = list(self._system)
        for number in range(turn):
            tokens += self._question(number) + self.answer(number)
        return tokens + self._question(turn)

    def answer(self, turn: int) -> list[int]:
        """What the model is made to answer.

        Never cut: `Llama` goes on generating behind a piece of a character, whatever its `max_tokens`.
        """
        return _tokens(self._llm, _ANSWER.format(number=turn))

    def left_behind(self, turn: int) -> list[int]:
        """What a context holds behind a turn: everything but the last token of the answer, which is never decoded."""
        return self.prompt(turn) + self.answer(turn)[:-1]

    def _question(self, number: int) -> list[int]:
        return _tokens(self._llm, _QUESTION.format(number=number, chat=self._chat))


def turn_tokens(llm: Any) -> int:
    """Tokens that a turn adds to a chat, its question and its answer."""
    return len(Script(llm, [], CHATS[0]).prompt(1)) - len(Script(llm, [], CHATS[0]).prompt(0))


def new_tokens(prompt: list[int], seen: list[list[int]]) -> int:
    """Tokens of a prompt that follow on the longest beginning which somebody has decoded before; at least its last one."""
    return len(prompt) - min(max((_common(prompt, other) for other in seen), default=0), len(prompt) - 1)


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
