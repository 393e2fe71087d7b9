"""Is restoring quicker than decoding? Measured here, with this model; nothing is guessed from its size."""

from dataclasses import dataclass, field

# Fixed cost of a restore: match, snapshot, threads, and llama.cpp's call. Measured at 2 to 3 ms for one block.
OVERHEAD_SECONDS = 0.003
# The newest measurement counts for this much: machines slow down when they get warm.
_WEIGHT = 0.3
# Of a process's first decode, where it is slower than what is known.
_FIRST_WEIGHT = 0.1
# Shorter runs measure the graph's set-up, not the model's speed.
_MIN_TOKENS = 32
_MIN_BYTES = 1 << 20
# Before the first measurement: what a laptop's page cache and two cores reach.
DEFAULT_RESTORE_RATE = 500e6


@dataclass(slots=True)
class BreakEven:
    """Keeps the two rates and compares.

    Attributes:
        prefill_rate: tokens a second that decoding a prompt reaches; None until measured.
        restore_rate: bytes a second that restoring reaches; None until measured.
    """

    prefill_rate: float | None = None
    restore_rate: float | None = None
    _is_warm: bool = field(default=False, init=False)
    _is_provisional: bool = field(default=False, init=False)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """`tokens` of a prompt were decoded in `seconds`.

        A process's first decode also reads the weights from the disk and sets up the graph, which can take many times as
        long as decoding. So where it is slower than what is known it counts little: not nothing, for a program that is started
        for each question has no other.
        """
        if tokens < _MIN_TOKENS or seconds <= 0:
            return
        rate, known = tokens / seconds, self.prefill_rate
        is_first, self._is_warm = not self._is_warm, True
        if known is None:
            self.prefill_rate, self._is_provisional = rate, is_first
            return
        if is_first and rate < known:
            self.prefill_rate = known + _FIRST_WEIGHT * (rate - known)
            return
        self.prefill_rate = rate if self._is_provisional and rate > known else _blend(known, rate)
        self._is_provisional = False

    def restored(self, n_bytes: int, seconds: float) -> None:
        """`n_bytes` of state were restored in `seconds`."""
        if n_bytes >= _MIN_BYTES and seconds > OVERHEAD_SECONDS:
            self.restore_rate = _blend(self.restore_rate, n_bytes / (seconds - OVERHEAD_SECONDS))

    def decode_seconds(self, tokens: int) -> float | None:
        """What decoding `tokens` would take, or None if nothing was measured yet."""
        return None if self.prefill_rate is None else tokens / self.prefill_rate

    def restore_seconds(self, n_bytes: int) -> float:
        """What restoring `n_bytes` would take."""
        return OVERHEAD_SECONDS + n_bytes / (self.restore_rate or DEFAULT_RESTORE_RATE)

    def worth(self, tokens: int, n_bytes: int) -> bool:
        """Whether restoring `n_bytes` is quicker than decoding the `tokens` that it saves.

        As long as prefill was never measured the answer is yes: whoever saved it had to decode it.
        """
        decode = self.decode_seconds(tokens)
        return decode is None or self.restore_seconds(n_bytes) < decode

    def describe(self, tokens: int, n_bytes: int) -> str:
        """The comparison in a sentence."""
        decode = (self.decode_seconds(tokens) or 0.0) * 1e3
        restore = self.restore_seconds(n_bytes) * 1e3
        return f"decoding {tokens} tokens takes about {decode:.0f} ms, restoring about {restore:.0f} ms"


def _blend(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
