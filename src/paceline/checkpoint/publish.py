"""A folder that appears whole or not at all, whatever is killed and whoever else writes beside it.

It is written under a hidden name, flushed to the disk, and renamed. While its process lives it holds a lock on the hidden
folder, which the system lets go at any death; so whoever comes next can tell what is left over from what is being written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import DeadlineError, UsageError

SAVING, REMOVING = ".saving", ".removing"
LOCK_TIMEOUT_S = 60.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the one lock of a folder, which every saver takes for the moments in which names change.

    Raises:
        DeadlineError: another process holds it for longer than a minute.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _lock(handle):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"another process has held the lock of {folder} for {LOCK_TIMEOUT_S:.0f} s; end it, or use another folder"
                )
            time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Take a lock if it is free. Where the file system knows no locks, it counts as taken by us."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


@contextlib.contextmanager
def writing(folder: Path, name: str) -> Iterator[Path]:
    """Give a hidden folder to write in; it is removed after the block unless it was published."""
    with locked(folder):
        hidden = folder / f".{name}.{secrets.token_hex(4)}{SAVING}"
        hidden.mkdir()
        handle = os.open(hidden, os.O_RDONLY)
        _lock(handle)
    try:
        yield hidden
    finally:
        # Published, this name is gone; else it goes while the lock still says whose it is.
        shutil.rmtree(hidden, ignore_errors=True)
        os.close(handle)


def publish(hidden: Path, final: Path) -> None:
    """Give a written folder its name; it is on the disk when this returns."""
    flush_folder(hidden)
    os.rename(hidden, final)
    flush_folder(final.parent)


def flush_folder(folder: Path) -> None:
    """Make sure that the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems flush folders by themselves
            raise
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Remove a folder so that it is never to be seen in part."""
    hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{REMOVING}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def clean(folder: Path) -> list[Path]:
    """Remove what dead processes left in a folder and return it; the caller holds the folder's lock."""
    removed = []
    for hidden in folder.glob(".*"):
        if hidden.is_symlink() or not hidden.is_dir():
            continue
        if hidden.name.endswith(REMOVING) or (hidden.name.endswith(SAVING) and _abandoned(hidden)):
            shutil.rmtree(hidden, ignore_errors=True)
            removed.append(hidden)
    return removed


def _abandoned(hidden: Path) -> bool:
    """Return whether the process that wrote here is gone: whether its lock is, where the file system knows locks."""
    try:
        handle = os.open(hidden, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextlib.contextmanager
def telling(target: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Turn a failure to write into one message that names the place and the bytes that it takes.

    Raises:
        UsageError: instead of any `OSError`.
    """
    try:
        yield
    except DeadlineError:  # an OSError as well
        raise
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in NO_SPACE:
            free = f", {_free(target.parent):,} are free" if error.errno == errno.ENOSPC else ""
            raise UsageError(
                f"cannot save {target}: {why}; it needs {needed():,} bytes{free}. Earlier checkpoints are whole: "
                "make space, keep fewer, or save to another disk"
            ) from error
        raise UsageError(f"cannot save {target}: {why}; pass a folder that you can write") from error


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
