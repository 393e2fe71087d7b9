"""Options that several subcommands share, each in one place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvkeep.cache.paths import VARIABLE, default_root, resolve_root
from kvkeep.store.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])


class _DefaultRootOption(click.Option):
    """Its help names the default folder, which depends on the environment at the time of asking."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0], f"{record[1]}  [default: {default_root()}]")


def _resolved(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> Path:
    return resolve_root(value)


def _resolved_if_given(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> Path | None:
    return None if value is None else resolve_root(value)


def path_option(command: Function) -> Function:
    """`--path FOLDER`, by default the folder that `attach` uses. The command gets `path: Path`."""
    return click.option(
        "--path",
        cls=_DefaultRootOption,
        metavar="FOLDER",
        callback=_resolved,
        help=f"The cache folder; {VARIABLE} names another default.",
    )(command)


def own_path_option(help_text: str) -> Callable[[Function], Function]:
    """`--path FOLDER` for a command with a default of its own. The command gets `path: Path | None`."""
    return click.option("--path", metavar="FOLDER", callback=_resolved_if_given, help=help_text)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
"""`--json`. The command gets `as_json: bool`, and prints with `print_json`."""


model_option = click.option(
    "--model", metavar="TEXT", help="Only this model: its label, or the beginning of its fingerprint (see kvkeep stats)."
)
"""`--model TEXT`. The command gets `model: str | None`, for `kvkeep.tools.choice.chosen_spaces`."""

gguf_option = click.option("--model", metavar="FILE", help="The model, a GGUF file.")
"""`--model FILE`. The command gets `model: str | None`, for `gguf_file`."""

set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument of llama_cpp.Llama as your program passes it, such as n_ctx=8192, flash_attn=true or type_k=q8_0. States "
    "are shared only under the same settings. May be given several times.",
)
"""`--set NAME=VALUE`. The command gets `settings: tuple[str, ...]`, for `kvkeep.cache.adapters.settings.llama_settings`."""

tokens_option = click.option(
    "--tokens",
    "n_tokens",
    type=int,
    metavar="N",
    help="Only the first N tokens of each, such as a system prompt that chats share.",
)
"""`--tokens N`. The command gets `n_tokens: int | None`, for `kvkeep.tools.prefixes.named_prefixes`."""

dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be done.")
"""`--dry-run`. The command gets `dry_run: bool`."""


def gguf_file(option: str, given: str) -> Path:
    """The GGUF file that an option names, looked at before anything is done with it.

    Raises:
        UsageError: there is none.
    """
    path = Path(given).expanduser()
    if not path.is_file():
        raise UsageError(f"{option} names a GGUF file; {path} {'is a folder' if path.is_dir() else 'does not exist'}")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UsageError(f"{option} names a GGUF file; {path} is none")
    return path.absolute()


def print_json(document: dict[str, Any]) -> None:
    """The one document of a `--json` command, in ASCII, so that any terminal and pipe takes it."""
    click.echo(json.dumps(document, indent=2))
