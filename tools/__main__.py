"""`python -m kvkeep.tools` is the `kvkeep` command."""

from kvkeep.tools.main import main

if __name__ == "__main__":
    main(prog_name="kvkeep")
