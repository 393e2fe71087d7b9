"""A restart against the length of its prompt: stored once, then a new process for each length, way and repetition."""

from pathlib import Path
from typing import Any

from kvkeep.tools.bench.plan import Plan
from kvkeep.tools.bench.steps import Given, Step
from kvkeep.tools.bench.ways import ATTACH, NO_CACHE, SEQUENCE_FILE

Row = dict[str, Any]

RESTARTS = (NO_CACHE, ATTACH, SEQUENCE_FILE)


def steps(given: Given, plan: Plan, folder: Path, found: Row) -> list[Step]:
    """The steps in their order. They fill `found`: `lengths`, `state_bytes`, and `restarts`, one row a process.

    Args:
        given: model and settings.
        plan: lengths and repetitions.
        folder: where the states lie between the steps.
        found: an empty document.
    """
    rows: list[Row] = []
    found |= {"lengths": list(plan.lengths), "restarts": rows}

    def keep() -> None:
        found.update(given.run("keep", folder=str(folder), lengths=list(plan.lengths)))

    def restart(number: int, length: int, way: str) -> Step:
        text = f"a restart with a prompt of {length:,} tokens: {way}, {number + 1} of {plan.repeats}"

        def do() -> None:
            rows.append({"repeat": number} | given.run("restart", folder=str(folder), way=way, length=length))

        return Step(text, do)

    order = [(number, length) for number in range(plan.repeats) for length in plan.lengths]
    return [Step(f"storing prompts of up to {plan.lengths[-1]:,} tokens", keep)] + [
        restart(number, length, way) for number, length in order for way in (RESTARTS[::-1] if number % 2 else RESTARTS)
    ]
