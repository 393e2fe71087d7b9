"""The `kvkeep` command in this process, as a person types it."""

import json
from typing import Any

from click.testing import CliRunner

from kvkeep.tools.main import main


def kvkeep(*arguments: object) -> str:
    """What a command says. It must end well."""
    result = CliRunner().invoke(main, [*map(str, arguments)], prog_name="kvkeep")
    assert result.exit_code == 0, f"{arguments}: {result.output}"
    return str(result.output)


def kvkeep_json(*arguments: object) -> dict[str, Any]:
    """What it says with `--json`."""
    found: dict[str, Any] = json.loads(kvkeep(*arguments, "--json"))
    return found
