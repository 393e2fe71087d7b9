"""What the two processes of a model found, as a row of the table; and whether that is good enough."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

# Largest error of a logit, as a share of the largest logit.
TOLERANCE = 1e-3
# Likewise, as a share of the error that a wrong state would make: a random model may hardly look at what came before.
WRONG_SHARE = 0.1
# Memories of their own kind, which nobody but llama.cpp can take apart, and which are therefore kept whole.
MOST_WHOLE = 4
# Of all models that the generator writes.
LEAST_IN_PARTS = 120

ANYWHERE, CHECKPOINTS, WHOLE, NOTHING, NO_MEMORY = "any position", "any checkpoint", "whole state", "nothing", "has no memory"


@dataclass
class Row:
    """One model.

    Attributes:
        file: its name, without `.gguf`.
        arch: `general.architecture`.
        memory: its kind, in words.
        window: positions of the window, 0 without one.
        restored: one of the words above.
        states: assembled states that were compared with llama.cpp's own.
        equal: of these, the ones that were equal byte for byte.
        prompts: prompts behind which logits were compared.
        exact: of these, the ones whose logits equalled both controls bit for bit.
        loaded: the largest error against a state that llama.cpp loaded by itself.
        live: the largest error against a context that was never saved.
        wrong: the error that other tokens in the place of the restored ones would make; the median of the prompts.
        edited: tokens restored for a prompt that leaves the stored one after 120.
        problems: sentences; none if all is as it should be.
    """

    file: str
    arch: str = ""
    memory: str = ""
    window: int = 0
    restored: str = NOTHING
    states: int = 0
    equal: int = 0
    prompts: int = 0
    exact: int = 0
    loaded: float = 0.0
    live: float = 0.0
    wrong: float = 0.0
    edited: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def remembers(self) -> bool:
        """Whether there is a memory, as far as anybody could find out."""
        return self.restored != NO_MEMORY


def row_of(file: str, saved: dict[str, Any], restarted: dict[str, Any]) -> Row:
    """The row of a model whose processes both ended well."""
    row = Row(file, saved["arch"], saved["memory"])
    if saved["memory"] == "none":
        row.restored = NO_MEMORY
        if restarted["alone"] != saved["alone"]:
            row.problems.append(f"generates {restarted['alone']} with attach and {saved['alone']} without")
        if restarted["reused"]:
            row.problems.append(f"{restarted['reused']} tokens were reused, and there is nothing to reuse")
        return row
    row.window = saved["n_swa"]
    _states(row, restarted["same"])
    _prompts(row, restarted["asked"], restarted["cuttable"])
    row.problems += [f"the store isn't sound: {finding}" for finding in restarted["findings"]]
    for process, found in (("save", saved), ("restart", restarted)):
        row.problems += [f"{process}: kvkeep warns: {message}" for message in found["said"]]
        row.problems += [f"{process}: {count} x {error}" for error, count in found["errors"].items()]
    return row


def _states(row: Row, same: Sequence[dict[str, Any]]) -> None:
    for found in same:
        where = f"{found['form']} form at {found['end']}"
        if found["length"] != found["end"]:
            row.problems.append(f"{where}: the store has {found['length']} tokens")
        if "equal" in found:
            row.states += 1
            row.equal += found["equal"]
            if not found["equal"]:
                first = f", different from byte {found['first']} on" if "first" in found else ""
                row.problems.append(f"{where}: {found['bytes']} bytes instead of {found['captured']}{first}")


def _prompts(row: Row, asked: Sequence[dict[str, Any]], cuttable: bool) -> None:
    row.prompts = len(asked)
    row.wrong = median(found.get("wrong", 0.0) for found in asked)
    for found in asked:
        where = f"{found['why']} at {found['expected']}"
        if (found["length"], found["source"]) != (found["expected"], "disk"):
            row.problems.append(f"{where}: {found['reason']}")
        if "loaded" in found:
            row.exact += found["loaded"] == found["live"] == 0.0
            row.loaded = max(row.loaded, found["loaded"])
            row.live = max(row.live, found["live"])
            for control in ("loaded", "live"):
                # Written so that a NaN is a problem, too.
                if not found[control] <= min(TOLERANCE, WRONG_SHARE * row.wrong):
                    row.problems.append(f"{where}: error {found[control]:.1e} against the {control} control")
        if found["why"] == "edited":
            row.edited = found["length"] if found["source"] == "disk" else 0
    as_expected = dict.fromkeys(("end", "again", "between"), True)
    for found in asked:
        if found["why"] in as_expected:
            as_expected[found["why"]] &= found["length"] == found["expected"] and found["source"] == "disk"
    if as_expected["end"] and as_expected["again"]:
        if any(found["opaque"] for found in asked):
            row.restored = WHOLE
        elif as_expected["between"]:
            row.restored = ANYWHERE if cuttable else CHECKPOINTS


def complaints(rows: Sequence[Row], complete: bool) -> list[str]:
    """Why the run failed; nothing if it didn't.

    Args:
        rows: one a model.
        complete: all models of the generator, not only some.
    """
    remembering = [row for row in rows if row.remembers]
    restored = Counter(row.restored for row in remembering)
    found = [f"{row.file}: {problem}" for row in rows for problem in row.problems]
    if restored[WHOLE] > MOST_WHOLE:
        found.append(f"{restored[WHOLE]} models are restored whole only, {MOST_WHOLE} at most are expected")
    if complete and restored[ANYWHERE] + restored[CHECKPOINTS] < LEAST_IN_PARTS:
        found.append(f"{restored[ANYWHERE] + restored[CHECKPOINTS]} models are restored in parts, not {LEAST_IN_PARTS}")
    return found


def summary(rows: Sequence[Row]) -> str:
    """The counts, in one sentence a line."""
    remembering = [row for row in rows if row.remembers]
    restored = Counter(row.restored for row in remembering)
    words = ", ".join(f"{restored[word]} {word}" for word in (ANYWHERE, CHECKPOINTS, WHOLE, NOTHING) if restored[word])
    states, equal = sum(row.states for row in rows), sum(row.equal for row in rows)
    prompts, exact = sum(row.prompts for row in rows), sum(row.exact for row in rows)
    live, loaded = max((row.live for row in rows), default=0.0), max((row.loaded for row in rows), default=0.0)
    lines = [
        f"{len(rows)} models of {len({row.arch for row in rows if row.arch})} architectures; "
        f"{len(remembering)} remember, {len(rows) - len(remembering)} have no memory.",
        f"Restored after a restart: {words or 'none'}.",
        f"Assembled states equal byte for byte: {equal} of {states}.",
        f"Logits equal bit for bit: {exact} of {prompts} prompts; largest error {live:.1e} against a live context, "
        f"{loaded:.1e} against a state that llama.cpp loaded by itself.",
    ]
    if blind := [row.file for row in remembering if not row.wrong > TOLERANCE]:
        lines.append(f"Wrong tokens would hardly show in the logits of {len(blind)}: {', '.join(blind)}.")
    return "\n".join(lines)
