"""An entry: whatever has a row that names a blob."""

from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.nodes import Node
from kvkeep.store.windows import Window

Entry = Node | Window | Checkpoint
