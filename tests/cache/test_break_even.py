"""Is restoring quicker? The answer follows from measurements only."""

import pytest

from kvkeep.cache.break_even import DEFAULT_RESTORE_RATE, OVERHEAD_SECONDS, BreakEven

MB = 1_000_000


def test_before_any_measurement_restoring_is_worth_it() -> None:
    rates = BreakEven()
    assert rates.worth(1, 10**12)
    assert rates.decode_seconds(100) is None
    assert rates.restore_seconds(0) == OVERHEAD_SECONDS


def test_slow_model_restores_and_quick_one_decodes() -> None:
    slow, quick = BreakEven(prefill_rate=100.0), BreakEven(prefill_rate=100_000.0)
    assert slow.worth(100, 10 * MB)
    assert not quick.worth(100, 10 * MB)


def test_a_few_tokens_arent_worth_the_overhead() -> None:
    rates = BreakEven(prefill_rate=1000.0, restore_rate=1e12)
    assert not rates.worth(2, 1)
    assert rates.worth(4, 1)


def test_remembered_rates_are_used() -> None:
    assert BreakEven(restore_rate=1e9).restore_seconds(10**9) == pytest.approx(1 + OVERHEAD_SECONDS)
    assert BreakEven().restore_seconds(int(DEFAULT_RESTORE_RATE)) == pytest.approx(1 + OVERHEAD_SECONDS)


def test_first_measurement_counts_in_full_and_later_ones_in_part() -> None:
    rates = BreakEven()
    rates.prefilled(1000, 1.0)
    assert rates.prefill_rate == 1000.0
    rates.prefilled(500, 1.0)
    assert rates.prefill_rate == pytest.approx(850.0)
    rates.prefilled(2000, 1.0)
    assert rates.prefill_rate == pytest.approx(0.7 * 850 + 0.3 * 2000)
    rates.restored(100 * MB, 1.0 + OVERHEAD_SECONDS)
    assert rates.restore_rate == pytest.approx(100e6)


def test_a_first_decode_that_waits_for_the_weights_counts_only_until_the_second() -> None:
    rates = BreakEven()
    rates.prefilled(100, 10.0)
    assert rates.prefill_rate == 10.0
    rates.prefilled(1000, 1.0)
    assert rates.prefill_rate == 1000.0


def test_a_first_decode_that_waits_for_the_weights_hardly_slows_a_remembered_rate() -> None:
    rates = BreakEven(prefill_rate=1000.0)
    rates.prefilled(100, 10.0)
    assert rates.prefill_rate == pytest.approx(901.0)
    rates.prefilled(901, 1.0)
    assert rates.prefill_rate == pytest.approx(901.0)


def test_programs_of_one_question_learn_that_decoding_has_become_slow() -> None:
    """The remembered rate may be that of a GPU that isn't used any more."""
    rate: float | None = 5000.0
    for _ in range(50):
        rates = BreakEven(prefill_rate=rate)
        rates.prefilled(4000, 80.0)
        rate = rates.prefill_rate
    assert BreakEven(prefill_rate=rate).worth(4000, 4000 << 17)


@pytest.mark.parametrize(("tokens", "seconds"), [(31, 1.0), (0, 1.0), (1000, 0.0), (1000, -1.0)])
def test_prefill_that_measures_nothing_is_passed_over(tokens: int, seconds: float) -> None:
    rates = BreakEven()
    rates.prefilled(tokens, seconds)
    assert rates.prefill_rate is None


@pytest.mark.parametrize(("n_bytes", "seconds"), [(1000, 1.0), (100 * MB, 0.0), (100 * MB, OVERHEAD_SECONDS)])
def test_restore_that_measures_nothing_is_passed_over(n_bytes: int, seconds: float) -> None:
    rates = BreakEven()
    rates.restored(n_bytes, seconds)
    assert rates.restore_rate is None


def test_the_comparison_is_told_with_both_figures() -> None:
    said = BreakEven(prefill_rate=1000.0, restore_rate=1e9).describe(50, 100 * MB)
    assert said == "decoding 50 tokens takes about 50 ms, restoring about 103 ms"
