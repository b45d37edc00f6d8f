"""Paceline trains any PyTorch module in any layout and gets the result that one device would have given."""

from paceline.checkpoint import Checkpoints, export_weights, load_weights
from paceline.data.contents import count_valid
from paceline.errors import CheckpointError, DeadlineError, Failure, MismatchError, PacelineError, PeerError, PlanError, UsageError
from paceline.evaluation import Best
from paceline.job import Job
from paceline.layout import Layout, Place
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.distributed import DistributedDataParallel
from paceline.plan import Plan
from paceline.report.loggers import JsonLines, TensorBoard
from paceline.report.reports import EvaluationReport, StepReport
from paceline.trace import Span, Trace
from paceline.trainer import Trainer

__all__ = [
    "Best",
    "CheckpointError",
    "Checkpoints",
    "DataParallel",
    "DeadlineError",
    "DistributedDataParallel",
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
    "export_weights",
    "load_weights",
]
