"""What torch.compile makes of a model: the same losses, in as few graphs as there are different blocks."""

from dataclasses import replace

import pytest
import torch

from lockstep.config import GPT, Config, Data, Train
from lockstep.layout.world import World
from lockstep.training.loop import train


@pytest.mark.slow
@pytest.mark.long
def test_compile_trains_alike() -> None:
    settings = Train(batch_size=8, steps=3, log_every=1, optimizer="adamw", lr=1e-3)
    graphs = {}
    for layers, ways in ((2, ("blocks", "model")), (1, ("blocks",))):
        config = Config(GPT(d_model=16, layers=layers, heads=2, context=16), Data("text", max_bytes=20_000), settings)
        plain = train(World(), config, quiet=True).losses
        for way in ways:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compiled = train(World(), replace(config, train=replace(settings, compile=way)), quiet=True)
            assert compiled.losses == pytest.approx(plain, rel=1e-4)
            split = compiled.spent.split()
            assert split["compiling"] > split["compute"] > 0
            graphs[layers, way] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Of a step: the model, or one block for all, and the loss; of evaluation: the loss, for two sizes of a batch.
    assert graphs == {(2, "model"): 4, (2, "blocks"): 4, (1, "blocks"): 4}
