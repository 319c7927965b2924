"""z-loss: gradients as torch computes them in one process, however the head is cut; the value without it."""

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import GPT, Parallel
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.models.loss import CrossEntropy, cross_entropy_sum, loss_for, with_correct_count
from lockstep.strategies import Options, make_layout, parallelize, strategy_named
from lockstep.verify.scenarios import Scenario
from tests.ranks import on_ranks

WEIGHT, STEPS = 0.3, 3
SCENARIO = Scenario("z-loss", GPT(d_model=16, layers=4, heads=4, context=8, vocabulary=19), (7,))
AT_2 = ["bucketed", "zero3", "fsdp", "single,tp=2", "single,tp=2:sequence", "single,tp=2:native", "single,pp=2:1f1b"]
AT_4 = ["zero1,tp=2", "bucketed,cp=2", "zero3,pp=2:zb-h1"]


def one_process(weight: float) -> tuple[dict[str, Tensor], list[float]]:
    """(weights after training, the cross entropies), written with torch's own means."""
    model = SCENARIO.build(seed=0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        batch = SCENARIO.global_batch(step)
        logits, targets = model(batch.inputs).flatten(0, -2), batch.targets.flatten()
        counted = targets != -100
        loss = nn.functional.cross_entropy(logits[counted], targets[counted])
        optimizer.zero_grad()
        (loss + weight * logits[counted].exp().sum(-1).log().square().mean()).backward()
        optimizer.step()
        losses.append(loss.item())
    return {n: p.detach() for n, p in model.named_parameters()}, losses


def trained_by(world: World, names: list[str]) -> dict[str, float]:
    """Of each strategy: how far its weights and losses are from one process's."""
    expected, losses = one_process(WEIGHT)
    found = {}
    for name in names:
        parallel = strategy_named(name, Parallel(bucket_mb=0.01))
        options = Options(
            CrossEntropy(WEIGHT), lambda parameters: torch.optim.SGD(parameters, lr=0.1), parallel, precision="fp64"
        )
        strategy = parallelize(SCENARIO.unbuilt(world.rank), make_layout(world, parallel), options)
        apart = []
        for step in range(STEPS):
            result = strategy.step(SCENARIO.global_batch(step).share(strategy.batch_share()))
            apart.append(abs(float(result.loss) - losses[step]))
        whole = strategy.full_state_dict()
        found[name] = max(*apart, *(float((whole[n] - expected[n]).abs().max()) for n in expected))
    return found


@pytest.mark.parametrize(("ranks", "names"), [(2, AT_2), pytest.param(4, AT_4, marks=pytest.mark.slow)])
def test_it_is_that_of_one_process(ranks: int, names: list[str]) -> None:
    for found in on_ranks(trained_by, ranks, names, timeout=240):
        assert max(found.values()) < 1e-12, found


def test_it_matters() -> None:
    with_it, without = one_process(WEIGHT)[0], one_process(0.0)[0]
    assert max(float((with_it[n] - without[n]).abs().max()) for n in with_it) > 1e-2


def test_the_value_stays_the_cross_entropy() -> None:
    logits, targets = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, -100, 3, 2, 0])
    value, correct = with_correct_count(CrossEntropy(0.1))(logits, targets)
    assert torch.equal(value, cross_entropy_sum(logits, targets))
    assert int(correct) == int((logits.argmax(-1) == targets).sum())


def test_other_losses_have_none() -> None:
    with pytest.raises(UserError, match=r"train.z_loss 0.1 belongs to the cross entropy, .* the mean squared error"):
        loss_for("regression", z_loss=0.1)
    with pytest.raises(UserError, match=r"the loss is train.loss torch:sum; leave one out"):
        loss_for("tokens", "torch:sum", z_loss=0.1)
