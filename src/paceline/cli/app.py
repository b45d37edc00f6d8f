"""All commands; a new one is a module with a function, registered here."""

from __future__ import annotations

import typer

from paceline.cli.checkpoint import checkpoint
from paceline.cli.export import export
from paceline.cli.train import train
from paceline.cli.verify import verify

app = typer.Typer(
    name="paceline",
    help="Train any PyTorch module on many devices and get the result that one device would have given.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(verify)
app.command()(export)
app.add_typer(checkpoint, name="checkpoint")


@app.callback()
def paceline() -> None:
    """Train any PyTorch module on many devices and get the result that one device would have given."""
