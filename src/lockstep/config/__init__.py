"""What was asked for: the config's dataclasses and their strict loading."""

from lockstep.config.check import check_ranges
from lockstep.config.load import load_config, save_config
from lockstep.config.models import CNN, GPT, HF, MLP, Model, Own, ResNet
from lockstep.config.schema import Checkpoint, Config, Data, Fp8, Lora, Metrics, Parallel, Planned, Train

__all__ = [
    "CNN",
    "GPT",
    "HF",
    "MLP",
    "Checkpoint",
    "Config",
    "Data",
    "Fp8",
    "Lora",
    "Metrics",
    "Model",
    "Own",
    "Parallel",
    "Planned",
    "ResNet",
    "Train",
    "check_ranges",
    "load_config",
    "save_config",
]
