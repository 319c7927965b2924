"""On a GPU: one is enough, its ranks share it over real NCCL."""

from typing import Any

import pytest
import torch

from lockstep.config import GPT, Config, Data, Train, load_config
from lockstep.launch import Launch, run_on_ranks
from lockstep.strategies import STRATEGIES, VARIANTS
from lockstep.training import train
from lockstep.verify import Request, verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(400),
]


def on_gpu(function: Any, nproc: int, *args: Any) -> list[Any]:
    return run_on_ranks(function, *args, launch=Launch(nproc=nproc, device="cuda", share_gpu=True, timeout=120))


@pytest.mark.parametrize(("ranks", "precision"), [(2, "fp64"), (4, "fp64"), (2, "fp32")])
def test_every_strategy_equals_one_process_on_nccl(ranks: int, precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    names = [n for n in (*STRATEGIES, *VARIANTS) if n != "single"]
    for verdict in on_gpu(verify, ranks, Request(names, steps=6, precision=precision))[0]:
        assert verdict.passed, f"{verdict.strategy}: {verdict.failures}"


def test_one_and_two_ranks_train_alike() -> None:
    config = load_config("configs/digits_cnn.yaml")
    one, two = (on_gpu(train, ranks, config, None, True)[0] for ranks in (1, 2))
    assert min(one.test_accuracy, two.test_accuracy) >= 0.98
    assert one.losses == pytest.approx(two.losses, abs=5e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_gpt_learns_in_mixed_precision(precision: str) -> None:
    model = GPT(d_model=64, layers=2, heads=4, context=64)
    settings = Train(steps=40, batch_size=32, optimizer="adamw", lr=3e-3, precision=precision, log_every=1)
    config = Config(model, Data(name="text", max_bytes=500_000), settings)
    result = on_gpu(train, 2, config, None, True)[0]
    assert result.losses[-1] < 0.7 * result.losses[0]


def test_compile_on_a_gpu() -> None:
    config = load_config("configs/digits_cnn.yaml")
    config.train.compile, config.train.steps = True, 30
    assert on_gpu(train, 1, config, None, True)[0].losses[-1] < 2.3
