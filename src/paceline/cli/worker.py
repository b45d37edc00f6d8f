"""The process of one worker: the launcher's command once more, with failures left for the launcher and no life of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from paceline.cli import main
from paceline.cli.failures import write_started

WATCH_EVERY_S = 0.25
PR_SET_PDEATHSIG = 1


def die_with(launcher: int) -> None:
    """End this process as soon as the process `launcher`, its parent, has ended in whatever way."""
    if sys.platform == "linux":
        # The kernel's promise holds even while a thread keeps the interpreter busy; it is bound to the thread that started
        # us, which is the launcher's main thread.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="paceline-launcher-watch", daemon=True).start()


if __name__ == "__main__":
    failures_folder, launcher_pid, *command = sys.argv[1:]
    die_with(int(launcher_pid))
    write_started(failures_folder)
    sys.exit(main(command, failures_folder=failures_folder))
