"""Turns in a running chat, after another chat and after a restart: each way in turn, in processes and a folder of its own."""

from typing import Any

from kvkeep.tools.bench.plan import Plan
from kvkeep.tools.bench.steps import Given, Step, own_folder
from kvkeep.tools.bench.ways import WAYS

Row = dict[str, Any]


def steps(given: Given, plan: Plan, rows: list[Row]) -> list[Step]:
    """One step for each way and round. Each adds a row: `round`, `way`, and what both processes have measured."""

    def step(number: int, way: str) -> Step:
        text = f"a chat, another chat, a restart: {way}, round {number + 1} of {plan.rounds}"
        return Step(text, lambda: rows.append({"round": number, "way": way} | _lives(given, plan, way)))

    # To and fro, because machines get warm.
    return [step(number, way) for number in range(plan.rounds) for way in (list(WAYS)[::-1] if number % 2 else WAYS)]


def _lives(given: Given, plan: Plan, way: str) -> Row:
    with own_folder(given.folder) as folder:
        common = {"way": way, "folder": str(folder), "system": plan.system, "turns": plan.turns}
        chat = given.run("talk", **common, restarted=False)
        again = given.run("talk", **common, restarted=True)
    opening = {"opening_seconds": chat.pop("opening_seconds"), "reopening_seconds": again.pop("opening_seconds")}
    return chat | again | opening
