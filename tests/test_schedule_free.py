"""Schedule-free AdamW: against its three sequences written out, and under every engine against one process."""

import torch
from torch import nn

import lockstep
from lockstep.layout.world import World
from lockstep.verify import Request, verify
from tests.ranks import on_ranks

ENGINES = ["bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp", "zero1_torch", "single,tp=2:sequence"]


def test_schedule_free_is_its_three_sequences() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(7, dtype=torch.float64))
    rates, beta1, beta2, decay = (0.01, 0.03, 0.02, 0.02), 0.9, 0.95, 0.1
    optimizer = lockstep.ScheduleFreeAdamW([parameter], lr=1.0, betas=(beta1, beta2), weight_decay=decay)
    z, x, v, total, largest = parameter.detach().clone(), parameter.detach().clone(), torch.zeros(7), 0.0, 0.0
    assert optimizer.evaluation_weight(parameter) is None
    for step, rate in enumerate(rates, 1):
        y = (1 - beta1) * z + beta1 * x
        assert torch.allclose(parameter, y, atol=1e-13)
        gradient = torch.randn(7, dtype=torch.float64)
        v = beta2 * v + (1 - beta2) * gradient**2
        z = z - rate * (gradient / ((v / (1 - beta2**step)).sqrt() + 1e-8) + decay * y)
        largest = max(largest, rate)
        total += largest**2
        x = (1 - largest**2 / total) * x + largest**2 / total * z
        parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        found = optimizer.evaluation_weight(parameter)
        assert found is not None
        assert torch.allclose(found, x, atol=1e-13)


def verified(world: World, names: list[str]) -> list[tuple[str, list[str]]]:
    request = Request(names, optimizer="schedule_free", only_values=True)
    return [(verdict.strategy, verdict.failures) for verdict in verify(world, request)]


def test_schedule_free_equals_one_process() -> None:
    """Weights, and the evaluation of their average, after every second step."""
    assert all(not failures for _, failures in on_ranks(verified, 2, ENGINES, timeout=240)[0])


def test_a_run_goes_on_with_another_beta1_from_the_same_average() -> None:
    parameter = nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = lockstep.ScheduleFreeAdamW([parameter], lr=0.05, betas=(0.9, 0.95))
    for _ in range(3):
        parameter.grad = torch.randn(5, dtype=torch.float64)
        optimizer.step()
    before = optimizer.evaluation_weight(parameter)
    optimizer.param_groups[0]["betas"] = (0.6, 0.95)
    assert before is not None
    assert torch.equal(before, optimizer.evaluation_weight(parameter))  # type: ignore[arg-type]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    share = 0.05**2 / (4 * 0.05**2)  # of the step without a rate, by the largest
    z = optimizer.state[parameter]["z"]
    assert torch.allclose(optimizer.evaluation_weight(parameter), before.lerp(z, share), atol=1e-12)  # type: ignore[arg-type]
