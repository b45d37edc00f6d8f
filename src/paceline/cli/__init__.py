"""The command `paceline`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from typer import Abort, Exit
from typer.main import get_command

from paceline.cli.app import app
from paceline.cli.failures import FAILED, MISUSED, Report, write_failure


def main(argv: Sequence[str] | None = None, *, failures_folder: str | None = None) -> int:
    """Run the command line `argv` (None: this process's) and return its exit status.

    Args:
        argv: arguments without the program's name.
        failures_folder: where to leave a failure for the launcher to print; None prints it here.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        # Commands find the arguments in the context's object: those that start processes pass them on.
        status = get_command(app).main(args=arguments, prog_name="paceline", standalone_mode=False, obj=arguments)
    except (Abort, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
        return 130
    except Exit as exit_:
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
    return status if isinstance(status, int) else 0
