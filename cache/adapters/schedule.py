"""Where, in a prompt that is about to be decoded, checkpoints are worth their copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvkeep.cache.adapters.live import LiveSequence
from kvkeep.cache.adapters.turns import UserTurns
from kvkeep.cache.break_even import BreakEven
from kvkeep.cache.points import schedule
from kvkeep.cache.report import Reporter

# Tokens between regular checkpoints, at least: what an edit in the middle of a prompt costs.
MIN_STEP = 256
# Regular checkpoints of one prompt, at most.
MAX_REGULAR = 16
# Copying a checkpoint may take this share of the time that decoding up to it takes...
COPY_SHARE = 0.02
# ... at this many bytes a second, which is slow.
COPY_RATE = 2e9


class Schedule:
    """The checkpoints of one model's prompts.

    Args:
        live: what its context holds.
        rates: how fast it decodes.
        reporter: counts and logs errors, which mean no checkpoints.
    """

    def __init__(self, live: LiveSequence, rates: BreakEven, reporter: Reporter) -> None:
        self._live = live
        self._rates = rates
        self._reporter = reporter
        self._turns: UserTurns | None = None

    def positions(self, llm: Any, tokens: Sequence[int]) -> list[int]:
        """Positions at which a checkpoint is to be taken, ascending.

        None for sequences of one token, as generation has them, nor where every token's logits are wanted.

        Args:
            llm: the model; its context stands before the tokens.
            tokens: what is about to be decoded.
        """
        if len(tokens) < 2 or llm._logits_all or not self._live.context.memory.needs_checkpoints:
            return []
        found: list[int] = []
        with self._reporter.border("planning checkpoints"):
            if self._live.can_take_points(llm):
                self._turns = self._turns or UserTurns(llm)
                prompt = np.concatenate([self._live.known_tokens(), np.asarray(tokens, np.int32)])
                found = schedule(llm.n_tokens, len(prompt), self._turns.last(prompt), self._step(llm, len(tokens)))
        return found

    def _step(self, llm: Any, n_tokens: int) -> int:
        """Tokens between regular checkpoints: whole batches, not too many of them, and cheap beside decoding them."""
        batch = min(llm.n_batch, llm.context_params.n_ubatch)
        wanted = max(MIN_STEP, n_tokens // MAX_REGULAR)
        if self._rates.prefill_rate is not None:
            seconds = self._live.context.point_bytes() / COPY_RATE
            wanted = max(wanted, int(seconds / COPY_SHARE * self._rates.prefill_rate))
        return int(-(-wanted // batch) * batch)
