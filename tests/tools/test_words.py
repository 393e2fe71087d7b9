import pytest

from kvkeep.tools import words


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (4 << 30, "4 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_size(n_bytes: int, expected: str) -> None:
    assert words.size(n_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 ms"), (0.0412, "41 ms"), (0.9999, "1.00 s"), (6.214, "6.21 s"), (59.999, "1 min 0 s"), (125, "2 min 5 s")],
)
def test_duration(seconds: float, expected: str) -> None:
    assert words.duration(seconds) == expected


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (-50, "just now"),
        (59, "just now"),
        (60, "1 min ago"),
        (7300, "2 h ago"),
        (86_400, "1 day ago"),
        (500_000, "5 days ago"),
    ],
)
def test_ago(age: float, expected: str) -> None:
    assert words.ago(1e9, 1e9 + age) == expected


@pytest.mark.parametrize(
    ("more", "less", "expected"), [(1, 1, "1.0x"), (99.4, 10, "9.9x"), (31, 1, "31x"), (1e6, 1, "1,000,000x"), (1, 0, "-")]
)
def test_ratio(more: float, less: float, expected: str) -> None:
    assert words.ratio(more, less) == expected


def test_plural() -> None:
    assert words.plural(1, "block") == "1 block"
    assert words.plural(1204, "block") == "1,204 blocks"
