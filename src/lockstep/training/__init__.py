"""The loop, its optimizer and its metrics."""

from lockstep.training.loop import TrainResult, evaluate, prepare_strategy, step_options, train
from lockstep.training.optimizer import optimizer_factory

__all__ = ["TrainResult", "evaluate", "optimizer_factory", "prepare_strategy", "step_options", "train"]
