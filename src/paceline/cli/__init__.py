"""The command `paceline`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from typer import Abort, Exit
from typer.main import get_command

from paceline.cli.app import app
from paceline.cli.failures import FAILED, MISUSED, STOPPED, Report, write_failure, write_stop
from paceline.cli.resume import spell_out


def main(argv: Sequence[str] | None = None, *, failures_folder: str | None = None) -> int:
    """Run the command line `argv` (None: this process's) and return its exit status.

    Args:
        argv: arguments without the program's name.
        failures_folder: where to leave a failure for the launcher to print; None prints it here.
    """
    arguments = spell_out(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        # Commands find the arguments in the context's object: those that start processes pass them on.
        status = get_command(app).main(args=arguments, prog_name="paceline", standalone_mode=False, obj=arguments)
    except (Abort, KeyboardInterrupt):
        if failures_folder is None:
            print("error: interrupted", file=sys.stderr)
        return 130
    except Exit as exit_:
        # Some versions of typer make this of a KeyboardInterrupt.
        if exit_.exit_code == 130 and failures_folder is None:
            print("error: interrupted", file=sys.stderr)
        return exit_.exit_code
    except BrokenPipeError:
        return FAILED
    except Exception as error:
        # Depending on its version typer brings click along or requires it; its usage errors have this method in both.
        if hasattr(error, "format_message"):
            print(f"error: {error.format_message().rstrip('.')}; see paceline --help", file=sys.stderr)
            return MISUSED
        report = Report.of(error, rank=int(os.environ.get("RANK", "0")))
        if failures_folder is None:
            report.show(as_peer=not report.is_own)
        else:
            write_failure(failures_folder, report)
        return report.status
    if status in STOPPED and failures_folder is not None:
        # To the launcher a status other than 0 is a failure, for which it would end the others in whatever they finish.
        write_stop(failures_folder, status)
        return 0
    return status if isinstance(status, int) else 0
