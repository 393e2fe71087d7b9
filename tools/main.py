"""The `kvkeep` command: its subcommands, and the border at which errors become sentences and exit codes."""

from typing import Any

import click

from kvkeep.store.errors import KvkeepError
from kvkeep.tools.bench.command import bench
from kvkeep.tools.budget import budget
from kvkeep.tools.compact import compact
from kvkeep.tools.demo import demo
from kvkeep.tools.export import export
from kvkeep.tools.import_ import import_
from kvkeep.tools.ls import ls
from kvkeep.tools.migrate import migrate
from kvkeep.tools.pin import pin, unpin
from kvkeep.tools.rm import rm
from kvkeep.tools.stats import stats
from kvkeep.tools.verify import verify
from kvkeep.tools.warm import warm

# What a shell reports for a command that Ctrl-C ended: 128 and the signal's number.
INTERRUPTED = 130


class Border(click.Group):
    """A group whose subcommands may raise any KvkeepError: it ends as one sentence on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvkeepError as error:
            for sentence in (error, *getattr(error, "__notes__", ())):
                click.echo(f"kvkeep: {sentence}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            # An end of line, so that the shell's prompt doesn't follow "^C".
            click.echo(err=True)
            ctx.exit(INTERRUPTED)


# "\b" keeps click from filling the paragraph.
_HELP = """Look after the llama.cpp states that kvkeep keeps on disk.

Assistants built on llama-cpp-python keep them with kvkeep.cache.attach(llm), and are warm again after a restart. The
folder can be looked at and cared for while they run. New here? Begin with: kvkeep demo
"""
_EXIT_CODES = """\b
Exit codes:
    0  all is well
    1  another error
    2  wrong usage
   11  the path can't hold a store
   12  other processes keep it locked
   21  its schema must be migrated, or couldn't be
   22  a newer kvkeep wrote it
   30  something in it is damaged
   34  a file itself is damaged
   35  a file that was to be imported is damaged
   5x  there is no room: 52 on the disk, else in the budget
  130  interrupted
"""


@click.group(cls=Border, help=_HELP, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvkeep", prog_name="kvkeep", message="%(prog)s %(version)s")
def main() -> None:
    """The `kvkeep` command."""


for command in (bench, budget, compact, demo, export, import_, ls, migrate, pin, rm, stats, unpin, verify, warm):
    main.add_command(command)
