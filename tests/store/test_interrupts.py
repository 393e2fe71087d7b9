"""Ctrl-C at any moment inside SQLAlchemy: no transaction stays open, and nobody waits for one."""

from pathlib import Path

from restart import run_child

# In a process of its own: pytest needs the timer for itself.
SCRIPT = """
import random, signal, sqlite3, sys
from pathlib import Path
from sqlalchemy import text
from kvkeep.store.engine import Index

path = Path(sys.argv[1])
index = Index(path)
index.upgrade()
armed, hits, chance = False, 0, random.Random(1)

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
other = sqlite3.connect(path, isolation_level=None, timeout=0)
while hits < 2000:
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 6e-4))
    try:
        armed = True
        with index.write() as connection:
            connection.execute(text("INSERT OR REPLACE INTO setting VALUES ('a', 1)"))
        with index.read() as connection:
            connection.execute(text("SELECT 1"))
    except KeyboardInterrupt:
        armed = False
        hits += 1
    armed = False
    # Raises "database is locked" at once if a transaction was left open.
    other.execute("BEGIN IMMEDIATE")
    other.execute("ROLLBACK")
print(hits)
"""


def test_no_interrupt_leaves_the_index_locked(tmp_path: Path) -> None:
    child = run_child(["-c", SCRIPT, str(tmp_path / "index.sqlite3")])
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.split() == ["2000"]
