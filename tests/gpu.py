"""Start ranks that share one GPU over real NCCL, for tests that need one."""

from typing import Any

import pytest
import torch

from lockstep.config import GPT, Config, Data, Train
from lockstep.launch import Launch, run_on_ranks
from lockstep.strategies import strategy_named

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(400),
]


def on_gpu(function: Any, nproc: int, *args: Any) -> list[Any]:
    return run_on_ranks(function, *args, launch=Launch(nproc=nproc, device="cuda", share_gpu=True, timeout=120))


def short_gpt(name: str, offload: str, precision: str = "fp32") -> Config:
    parallel = strategy_named(name)
    parallel.offload = offload  # type: ignore[assignment]
    settings = Train(steps=6, batch_size=8, optimizer="adamw", lr=1e-3, clip_norm=1.0, log_every=1, precision=precision)
    model = GPT(d_model=64, layers=3, heads=4, context=32)
    return Config(model, Data(name="text", max_bytes=200_000), settings, parallel)
