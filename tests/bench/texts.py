"""Prompts for benches: always the same ones, of about a wanted length, and no two alike."""

import random
from typing import Any

Message = dict[str, str]

_VERBS = ("open", "find", "send", "rename", "convert", "archive", "compare", "schedule", "summarise", "translate")
_THINGS = ("a document", "a mail", "a photo", "a calendar entry", "a note", "a folder", "a song", "a bill", "a contact")
_MANNERS = ("without asking again", "after showing a preview", "only if the person agrees", "in the background", "at once")
_TOPICS = (
    "the quarterly report that Maria sent last week",
    "my flight to Lisbon",
    "the recipe with the aubergines",
    "the broken printer in the hall",
    "the contract with the gardener",
    "my notes on Roman history",
    "the bill for the heating",
    "tomorrow's meeting with the architects",
    "the playlist for the long drive",
    "the letter from the school",
)


def system_prompt(llm: Any, n_tokens: int) -> str:
    """A desktop assistant's system prompt of about `n_tokens` tokens: who it is, and its tools."""
    draw = random.Random(1)
    lines = ["You are the assistant of a desktop computer. You answer briefly, and you use these tools:"]
    count = 0
    while count < n_tokens:
        count += len(llm.tokenize(f"{lines[-1]}\n".encode(), add_bos=False))
        verb, thing, manner = draw.choice(_VERBS), draw.choice(_THINGS), draw.choice(_MANNERS)
        lines.append(f"{verb}_{draw.randrange(10**4)}(name, {draw.choice('abcdefgh')}): {verb} {thing}, {manner}.")
    return "\n".join(lines)


def question(number: int) -> str:
    """One of many different questions of 20 to 40 tokens."""
    draw = random.Random(100 + number)
    start = ("What do you know about", "Please help me with", "Remind me later of", "Could you tell me more about")
    first, second = draw.sample(_TOPICS, 2)
    return f"{draw.choice(start)} {first}, item {draw.randrange(1000)}, and is there a connection with {second}?"


def long_tokens(llm: Any, n_tokens: int) -> list[int]:
    """Exactly `n_tokens` tokens of text."""
    tokens: list[int] = llm.tokenize(system_prompt(llm, n_tokens).encode())
    return tokens[:n_tokens]
