"""Checkpoints: what a run is, as one value, on disk whole or not at all."""

from paceline.checkpoint.differences import Difference, compare, describe
from paceline.checkpoint.fit import Misfit, fits, weight_misfits
from paceline.checkpoint.generators import random_states, set_random_states
from paceline.checkpoint.optimizers import group_names, load_optimizer, optimizer_state
from paceline.checkpoint.state import OptimizerState, State, snapshot
from paceline.checkpoint.store import Checkpoints, CheckReport
from paceline.checkpoint.weights import export_weights, load_weights
from paceline.errors import CheckpointError

__all__ = [
    "CheckReport",
    "CheckpointError",
    "Checkpoints",
    "Difference",
    "Misfit",
    "OptimizerState",
    "State",
    "compare",
    "describe",
    "export_weights",
    "fits",
    "group_names",
    "load_optimizer",
    "load_weights",
    "optimizer_state",
    "random_states",
    "set_random_states",
    "snapshot",
    "weight_misfits",
]
