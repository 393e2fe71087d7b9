"""A new process for each step, as after a restart: run `python restart.py JSON`, or call `in_new_process`.

The JSON names a model, its options, a root (or null for no cache), and prompts of tokens. For each prompt a few tokens are
generated greedily. Answers one JSON document: per prompt what llama.cpp decoded, what the cache says, and the logits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent


def in_new_process(model: str, root: Path | None, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
    """What `main` answers, from a process of its own that has ended normally."""
    task = {"model": model, "root": None if root is None else str(root), "prompts": prompts} | more
    child = run_child([str(SUPPORT / "restart.py"), json.dumps(task)])
    assert child.returncode == 0, child.stderr[-4000:]
    answer: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return answer


def run_child(arguments: list[str], **more: Any) -> "subprocess.CompletedProcess[str]":
    """A Python process that finds this folder's modules."""
    env = os.environ | {"PYTHONPATH": str(SUPPORT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=600, **more)


def main() -> None:
    import llamas

    from kvkeep.cache import attach

    task = json.loads(sys.argv[1])
    llm = llamas.load(task["model"], **task.get("options", {}))
    keep = None if task["root"] is None else attach(llm, task["root"], break_even=task.get("break_even", False))
    answers = []
    for prompt in task["prompts"]:
        before = llamas.n_decoded(llm)
        stream = llm.generate(prompt, temp=0.0)
        tokens = [next(stream)]
        decoded = llamas.n_decoded(llm) - before
        logits = llamas.logits(llm)
        tokens += [next(stream) for _ in range(task.get("count", 1) - 1)]
        stream.close()
        last = None if keep is None else keep.last
        answers.append(
            {
                "decoded": decoded,
                "tokens": tokens,
                "logits": logits.tolist(),
                "length": last.length if last else 0,
                "source": last.source.value if last else "none",
                "reason": last.reason.value if last else "none",
            }
        )
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
