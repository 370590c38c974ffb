"""Whole training steps inside a memory budget: precision, accumulation, clipping, bad steps, checkpoints."""

from gradstow.train._choose import Alternative, Choice, choose
from gradstow.train._clip import AdaptiveClip, Clip, ClipResult, GlobalNorm, PerParameter, PreviousNorm
from gradstow.train._groups import parameter_groups
from gradstow.train._inside import optimize_inside
from gradstow.train._large import lamb, lars, linear_warmup, scaled_lr
from gradstow.train._max_batch import MaxBatch, max_batch
from gradstow.train._precision import Precision
from gradstow.train._step import StepResult, TrainStep
from gradstow.train._watch import Watch

__all__ = [
    "AdaptiveClip",
    "Alternative",
    "Choice",
    "Clip",
    "ClipResult",
    "GlobalNorm",
    "MaxBatch",
    "PerParameter",
    "Precision",
    "PreviousNorm",
    "StepResult",
    "TrainStep",
    "Watch",
    "choose",
    "lamb",
    "lars",
    "linear_warmup",
    "max_batch",
    "optimize_inside",
    "parameter_groups",
    "scaled_lr",
]
