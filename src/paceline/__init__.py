"""Paceline trains any PyTorch module in any layout and gets the result that one device would have given."""

from paceline.data.contents import count_valid
from paceline.errors import DeadlineError, Failure, MismatchError, PacelineError, PeerError, PlanError, UsageError
from paceline.job import Job
from paceline.layout import Layout, Place
from paceline.plan import Plan
from paceline.report.loggers import JsonLines, TensorBoard
from paceline.report.reports import EvaluationReport, StepReport
from paceline.trace import Span, Trace
from paceline.trainer import Trainer

__all__ = [
    "DeadlineError",
    "EvaluationReport",
    "Failure",
    "Job",
    "JsonLines",
    "Layout",
    "MismatchError",
    "PacelineError",
    "PeerError",
    "Place",
    "Plan",
    "PlanError",
    "Span",
    "StepReport",
    "TensorBoard",
    "Trace",
    "Trainer",
    "UsageError",
    "count_valid",
]
