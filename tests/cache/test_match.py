"""What a look-up says, in figures and in words."""

import pytest

from kvkeep.cache.match import Match, Reason, Source


def test_what_isnt_reused_is_decoded() -> None:
    assert Match(length=30, prompt_tokens=50).decoded == 20


@pytest.mark.parametrize(
    ("match", "said"),
    [
        (Match(length=3, prompt_tokens=5, source=Source.DISK), "3 of 5 tokens from disk"),
        (Match(length=3, prompt_tokens=5, source=Source.LIVE), "3 of 5 tokens from live"),
        (Match(length=0, prompt_tokens=5, reason=Reason.EMPTY), "none of 5 tokens reused: empty"),
        (
            Match(length=0, prompt_tokens=5, reason=Reason.DAMAGED, detail="blob 12 is missing"),
            "none of 5 tokens reused: damaged (blob 12 is missing)",
        ),
    ],
)
def test_a_miss_says_why(match: Match, said: str) -> None:
    assert str(match) == said


def test_every_reason_has_words_of_its_own() -> None:
    assert len({reason.value for reason in Reason}) == len(Reason)


def test_a_miss_reads_nothing() -> None:
    found = Match(length=0, prompt_tokens=5, reason=Reason.EMPTY)
    assert (found.plain_bytes, found.entries) == (0, [])
