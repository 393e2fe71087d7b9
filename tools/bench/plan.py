"""How much is measured: as much as fits into the time that a person waits, on this machine and with this model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.store.errors import UsageError
from kvkeep.tools.bench.ways import WAYS
from kvkeep.tools.words import duration

# What a run may take, if it can; a slow model takes longer for the smallest plan.
_SECONDS = {False: 210.0, True: 40.0}
# A process besides its model: imports, opening a store, ending.
_PROCESS_SECONDS = 1.2
# Attention takes longer in long prompts than in the one that was timed.
_LONGER = 1.2
# Not even a short chat fits into less.
_MIN_SYSTEM = 64
# What the bench asks for unless it is told another size.
N_CTX = 4608
# Tokens that are decoded to learn how fast the model is.
PROBE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured with a model.

    Attributes:
        rounds: times that each way has the whole chat.
        system: tokens of the system prompt.
        turns: of the chat, before another one comes between.
        repeats: times that each way restarts with a prompt of each length.
        lengths: of these prompts, in tokens.
    """

    rounds: int
    system: int
    turns: int
    repeats: int
    lengths: tuple[int, ...]

    def seconds(self, probe: Mapping[str, Any]) -> float:
        """About how long it takes.

        Args:
            probe: what `kvkeep.tools.bench.chat.probe` found.
        """
        turn, ways = probe["turn_tokens"], len(WAYS)
        # The first turn is new to everybody, and after a restart two of the ways have nothing.
        answers = ways * (self.turns + 3)
        per_round = ways * self.system + 2 * (self.system + (self.turns + 2) * turn) + answers * turn
        tokens = self.rounds * per_round + max(self.lengths) + self.repeats * sum(self.lengths)
        processes = self.rounds * 2 * ways + 1 + self.repeats * 3 * len(self.lengths)
        decoding = (
            _LONGER * tokens / probe["tokens_per_second"]
            + self.rounds * answers * probe["answer_tokens"] / probe["generated_per_second"]
        )
        return float(decoding + processes * (probe["load_seconds"] + _PROCESS_SECONDS))

    def disk_bytes(self, probe: Mapping[str, Any]) -> int:
        """The most that lies on the disk at a time: states of one way's chat, or of all lengths in two ways."""
        chat = self.system + (self.turns + 2) * probe["turn_tokens"]
        # The stock disk cache keeps a whole state a turn, with all scores.
        whole = (self.turns + 3) * (chat * probe["state_bytes_per_token"] + probe["score_bytes"])
        return int(max(whole, (sum(self.lengths) + max(self.lengths)) * probe["state_bytes_per_token"])) + (64 << 20)


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """What is measured without a model.

    Attributes:
        shape: layers, heads, numbers of a head.
        tokens: of the states that are saved and restored.
        rounds: times for each of them.
        few, many: chats in the stores that are looked up in.
        chat_tokens: tokens of each of these chats.
        lookups: look-ups in each store.
    """

    shape: tuple[int, int, int]
    tokens: tuple[int, ...]
    rounds: int
    few: int
    many: int
    chat_tokens: int
    lookups: int

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        layers, heads, dim = self.shape
        n_bytes = self.rounds * sum(self.tokens) * layers * heads * dim * 4
        return n_bytes / 60e6 + (self.many + self.few) * self.chat_tokens / 400e3


# The attention of a model of 7B parameters: 32 layers, 8 heads of 128 numbers, 128 KiB a token in f16.
_SHAPE = (32, 8, 128)
_CHAT_TOKENS = 6400
STORE = StoreSizes(_SHAPE, (2048, 8192, 32768), 3, 10, 1000, _CHAT_TOKENS, 300)
STORE_QUICK = StoreSizes(_SHAPE, (2048,), 2, 10, 100, _CHAT_TOKENS, 200)
# Beside a model, which takes most of the time.
STORE_BESIDE = StoreSizes(_SHAPE, (2048,), 2, 10, 1000, _CHAT_TOKENS, 300)
STORE_BESIDE_QUICK = StoreSizes(_SHAPE, (1024,), 1, 10, 100, _CHAT_TOKENS, 100)

PLANS = (
    Plan(3, 1000, 4, 3, (256, 512, 1024, 2048, 4096)),
    Plan(3, 1000, 4, 3, (256, 512, 1024, 2048)),
    Plan(3, 1000, 4, 2, (256, 512, 1024, 2048)),
    Plan(2, 1000, 4, 2, (256, 512, 1024, 2048)),
    Plan(2, 1000, 3, 2, (256, 512, 1024)),
    Plan(1, 1000, 3, 2, (256, 512, 1024)),
    Plan(1, 1000, 3, 1, (256, 512, 1024)),
)
QUICK_PLANS = (
    Plan(1, 500, 3, 1, (256, 512, 1024)),
    Plan(1, 300, 2, 1, (128, 256, 512)),
    Plan(1, 150, 2, 1, (128, 256)),
)
"""From the largest to the smallest."""


def chosen(probe: Mapping[str, Any], *, quick: bool, besides: float) -> Plan:
    """The largest plan that fits into the time, or the smallest one; cut to the context.

    Args:
        probe: what `kvkeep.tools.bench.chat.probe` found.
        quick: less is measured.
        besides: seconds that other things take.

    Raises:
        UsageError: the context is too small for a chat.
    """
    plans = [_cut(plan, probe) for plan in (QUICK_PLANS if quick else PLANS)]
    return next((plan for plan in plans if plan.seconds(probe) + besides <= _SECONDS[quick]), plans[-1])


def _cut(plan: Plan, probe: Mapping[str, Any]) -> Plan:
    room, turn = probe["usable_context"], probe["turn_tokens"]
    chat = (plan.turns + 2) * turn
    lengths = tuple(length for length in plan.lengths if length + turn <= room)
    if room - chat < _MIN_SYSTEM or not lengths:
        needed = max(chat + _MIN_SYSTEM, plan.lengths[0] + turn)
        raise UsageError(f"the context is too small: the bench needs {needed} tokens, and has {room}; name n_ctx with --set")
    return Plan(plan.rounds, min(plan.system, room - chat), plan.turns, plan.repeats, lengths)


def about(seconds: float) -> str:
    """`about 3 min 10 s`: rounded to what an estimate is worth."""
    if seconds < 57.5:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    return f"about {duration(10 * round(seconds / 10))}"
