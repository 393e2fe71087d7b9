"""Every error that kvkeep raises. Imports nothing, so that everyone can import it.

    KvkeepError                   1   base
      UsageError                  2   an argument is wrong (also a ValueError)
      StoreError                 10
        NotARoot                 11   the path is a file, or can't be made or written
        StoreLocked              12   another process holds the lock for longer than we wait
        StoreClosed              13   used after close(), or on the other side of a fork
      VersionError               20
        MigrationFailed          21   the schema couldn't be brought up to date
        TooNew                   22   written by a newer kvkeep
      IntegrityError             30
        BadFrame                 31   not a frame or stored value of ours, or of an unknown version
        HashMismatch             32   the bytes are not those that the name promises
        MissingBlob              33   a row names a blob that isn't there
        DamagedFile              34   LMDB's or SQLite's own structures are damaged, not just one entry
        BadBundle                35   a file that is no bundle of ours, or a damaged one
      LayoutError                40
        UnknownLayout            41   llama.cpp bytes of a kind that the parser doesn't know
        TruncatedState           42   llama.cpp bytes that end too early or too late
        StateRefused             43   llama.cpp didn't take an assembled state
        NotIdentified            44   the model's files changed, so whose states these are isn't known
      CapacityError              50
        MapFull                  51   the blobs' share of the byte budget is used up
        DiskFull                 52   the disk has no room
        TooLarge                 53   one entry is larger than the whole budget
        IndexFull                54   the index's share of the byte budget is used up
        DailyLimit               55   as many bytes as may be were stored today

The numbers are the exit codes of the `kvkeep` command. A miss is no error: it is a `Match` of length 0 with a reason.
"""


class KvkeepError(Exception):
    """Base of every error of kvkeep. `exit_code` is what the `kvkeep` command returns for it."""

    exit_code = 1


class UsageError(KvkeepError, ValueError):
    """An argument is wrong. The message names the argument, its value and what was expected."""

    exit_code = 2


class StoreError(KvkeepError):
    exit_code = 10


class NotARoot(StoreError):
    """The path can't hold a store: it is a file, or can't be created, read or written."""

    exit_code = 11


class StoreLocked(StoreError):
    """A lock stayed busy for longer than the caller is willing to wait."""

    exit_code = 12


class StoreClosed(StoreError):
    """The store was closed, or belongs to the process that this one was forked from."""

    exit_code = 13


class VersionError(KvkeepError):
    exit_code = 20


class MigrationFailed(VersionError):
    """The schema couldn't be created or brought up to date. The old one is unchanged."""

    exit_code = 21


class TooNew(VersionError):
    """The root was written by a newer kvkeep. The message names both schema versions."""

    exit_code = 22


class IntegrityError(KvkeepError):
    exit_code = 30


class BadFrame(IntegrityError):
    """Bytes that are no frame or stored value of ours, or of a version that this kvkeep doesn't read."""

    exit_code = 31


class HashMismatch(IntegrityError):
    """Bytes that don't hash to their name, or a frame that belongs to another key."""

    exit_code = 32


class MissingBlob(IntegrityError):
    """A row names a blob that isn't in the blob store."""

    exit_code = 33


class DamagedFile(IntegrityError):
    """LMDB's or SQLite's own structures are damaged. The next open that is alone recovers what it can."""

    exit_code = 34


class BadBundle(IntegrityError):
    """A file that is no bundle of ours, or one that is cut off or damaged. Nothing of it was stored."""

    exit_code = 35


class LayoutError(KvkeepError):
    exit_code = 40


class UnknownLayout(LayoutError):
    """A llama.cpp state of a kind that the parser doesn't know. It can still be kept whole."""

    exit_code = 41


class TruncatedState(LayoutError):
    """A llama.cpp state that ends before or after its last field."""

    exit_code = 42


class StateRefused(LayoutError):
    """llama.cpp took fewer bytes than it was given, or stands at another position afterwards."""

    exit_code = 43


class NotIdentified(LayoutError):
    """The model's files changed after they were loaded, so nobody knows whose states these are."""

    exit_code = 44


class CapacityError(KvkeepError):
    exit_code = 50


class MapFull(CapacityError):
    """The LMDB map, which is the blobs' share of the byte budget, has no room left."""

    exit_code = 51


class DiskFull(CapacityError):
    """The disk, or the user's quota on it, has no room left."""

    exit_code = 52


class TooLarge(CapacityError):
    """One entry is larger than everything that the budget allows."""

    exit_code = 53


class IndexFull(CapacityError):
    """The index's share of the byte budget is used up, or a hanging reader keeps its log from being emptied."""

    exit_code = 54


class DailyLimit(CapacityError):
    """As many bytes as may be stored a day were stored today."""

    exit_code = 55
