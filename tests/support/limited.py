"""A chat in a process that is limited in what it may write: `python limited.py JSON`."""

import json
import logging
import os
import resource
import sys


def main() -> None:
    task = json.loads(sys.argv[1])
    import llamas

    from kvkeep.cache import attach

    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    llm = llamas.load(task["model"])
    if task.get("unprivileged") and os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    if "file_bytes" in task:
        resource.setrlimit(resource.RLIMIT_FSIZE, (task["file_bytes"], task["file_bytes"]))
    keep = attach(llm, task["root"], break_even=False)
    tokens = []
    for prompt in task["prompts"]:
        tokens.append(llamas.generate(llm, prompt, 4))
        keep.flush()
    stats = keep.stats()
    keep.close()
    print(json.dumps({"tokens": tokens, "errors": stats.errors, "reasons": stats.reasons}))


if __name__ == "__main__":
    main()
