"""The loop, its optimizer, its metrics and its checkpoints."""

from lockstep.training.loop import TrainResult, evaluate, train
from lockstep.training.optimizer import optimizer_factory
from lockstep.training.prepare import prepare_strategy, step_options

__all__ = ["TrainResult", "evaluate", "optimizer_factory", "prepare_strategy", "step_options", "train"]
