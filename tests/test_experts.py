"""A mixture of experts in one process: the layer against its formulas."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep import MixtureOfExperts
from tests.ranks import refused

D, WIDTH, EXPERTS = 6, 5, 8
OPTIONS: list[dict[str, Any]] = [
    {},
    {"normalize": False},
    {"scoring": "sigmoid", "shared": 2},
    {"balance": "loss"},
    {"balance": "loss", "scoring": "sigmoid", "z_loss": 1e-2, "shared": 1},
    {"balance": "bias", "scoring": "sigmoid", "balance_coefficient": 0.05},
    {"capacity": 0.75, "balance": "loss"},
]


def build(active: int = 2, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(1)
    moe = MixtureOfExperts(D, WIDTH, EXPERTS, active, **options).double()
    if moe.router.bias is not None:
        with torch.no_grad():
            moe.router.bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
    return moe


def tokens(count: int = 24, seed: int = 2) -> Tensor:
    """Not the same for all experts: some get none."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, D, generator=generator, dtype=torch.float64) + torch.linspace(-1, 1, D)


def by_formula(moe: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """(output, load, auxiliary loss, dropped), token by token and choice by choice."""
    load = torch.zeros(EXPERTS, dtype=torch.int64)
    taken = [0] * EXPERTS
    outputs, shares, squares, dropped = [], [], [], 0
    limit = len(x) * moe.active * moe.capacity / EXPERTS if moe.capacity is not None else float("inf")
    for token in x:
        logits = moe.router.weight @ token
        scores = torch.softmax(logits, 0) if moe.scoring == "softmax" else torch.sigmoid(logits)
        by = scores if moe.router.bias is None else scores + moe.router.bias
        chosen = sorted(range(EXPERTS), key=lambda e: -by[e].item())[: moe.active]
        total = sum(scores[e] for e in chosen) if moe.normalize else 1.0
        y = torch.zeros_like(token)
        for e in chosen:
            load[e] += 1
            if taken[e] >= -(-limit // 1):
                dropped += 1
                continue
            taken[e] += 1
            hidden = F.silu(moe.experts.gate[e] @ token) * (moe.experts.up[e] @ token)
            y = y + scores[e] / total * (moe.experts.down[e] @ hidden)
        if moe.shared is not None:
            inner = F.silu(moe.shared.gate.weight @ token) * (moe.shared.up.weight @ token)
            y = y + moe.shared.down.weight @ inner
        outputs.append(y)
        shares.append(scores / scores.sum())
        squares.append(torch.logsumexp(logits, 0) ** 2)
    loss = torch.zeros((), dtype=torch.float64)
    if moe.balance == "loss":
        used, mean = load.double() / load.sum(), torch.stack(shares).mean(0)
        loss = moe.balance_coefficient * EXPERTS * (used * mean).sum()
    if moe.z_loss:
        loss = loss + moe.z_loss * torch.stack(squares).mean()
    return torch.stack(outputs), load, loss, dropped


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("active", [1, 2, 8])
def test_the_layer_is_its_formulas(options: dict[str, Any], active: int) -> None:
    moe, x = build(active, **options), tokens().requires_grad_()
    expected, load, loss, dropped = by_formula(moe, x)
    found = moe(x.view(4, 6, D)).view(-1, D)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert moe.load.tolist() == load.tolist()
    assert int(moe.dropped) == dropped
    assert (dropped > 0) == ("capacity" in options)
    torch.testing.assert_close(moe.auxiliary_loss, loss, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    wanted = torch.autograd.grad((expected * weights).sum() + loss, [x, *moe.parameters()], allow_unused=True)
    got = torch.autograd.grad((found * weights).sum() + moe.auxiliary_loss, [x, *moe.parameters()])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=0, atol=1e-11)


def test_names_and_shapes() -> None:
    moe = MixtureOfExperts(D, WIDTH, EXPERTS, 2, shared=2, balance="bias")
    assert {name: tuple(t.shape) for name, t in moe.state_dict().items()} == {
        "router.weight": (EXPERTS, D),
        "router.bias": (EXPERTS,),
        "experts.gate": (EXPERTS, WIDTH, D),
        "experts.up": (EXPERTS, WIDTH, D),
        "experts.down": (EXPERTS, D, WIDTH),
        "shared.gate.weight": (2 * WIDTH, D),
        "shared.up.weight": (2 * WIDTH, D),
        "shared.down.weight": (D, 2 * WIDTH),
    }


def test_the_bias_moves_once_for_each_step() -> None:
    """By the load of all its micro-batches, not of evaluation, and not again for what is recomputed."""
    moe = build(balance="bias", balance_coefficient=0.5)
    twin = copy.deepcopy(moe)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.0)
    assert moe.router.bias is not None
    before = moe.router.bias.clone()
    load = torch.zeros(EXPERTS)
    for i, part in enumerate((tokens(12), -tokens(16), tokens(4, 5))):
        if i == 1:  # of other experts; the rest counts twice, if what is recomputed counts
            moe(part).sum().backward()
        else:
            torch.utils.checkpoint.checkpoint(moe, part.clone().requires_grad_(), use_reentrant=False).sum().backward()
        load += moe.load
    with torch.no_grad():
        moe.eval()(tokens(50, 3))
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    other.step()
    assert torch.equal(moe.router.bias, before), "another model's step moves nothing"
    optimizer.step()
    torch.testing.assert_close(moe.router.bias, before + 0.5 * torch.sign(load.mean() - load).double())
    after = moe.router.bias.clone()
    optimizer.step()
    assert torch.equal(moe.router.bias, after), "nothing has passed since"
    assert twin.router.bias is not None
    assert torch.equal(twin.router.bias, before)


def test_a_copy_after_training_has_no_graph_and_the_bias_stays_wide() -> None:
    moe = build(balance="loss")
    moe(tokens()).sum().backward()
    assert moe.auxiliary_loss.requires_grad
    assert not copy.deepcopy(moe).auxiliary_loss.requires_grad
    narrow = build(balance="bias").to(torch.bfloat16)
    assert narrow.router.bias is not None
    assert (narrow.router.bias.dtype, narrow.router.weight.dtype) == (torch.float64, torch.bfloat16)


def test_a_step_that_a_fused_optimizer_skips_moves_no_bias() -> None:
    moe = build(balance="bias")
    optimizer = torch.optim.Adam(moe.parameters(), lr=0.0, fused=True)
    assert moe.router.bias is not None
    for skipped in (1.0, 0.0):
        before = moe.router.bias.clone()
        moe(tokens()).sum().backward()
        optimizer.found_inf = torch.tensor(skipped)  # type: ignore[attr-defined]
        optimizer.step()
        assert torch.equal(moe.router.bias, before) == bool(skipped)


def test_bad_sizes_are_one_line() -> None:
    said = refused(
        [
            lambda: MixtureOfExperts(8, 8, 4, 5),
            lambda: MixtureOfExperts(8, 8, 4, 0),
            lambda: MixtureOfExperts(8, 8, 4, 2, capacity=0.0),
            lambda: MixtureOfExperts(8, 8, 4, 2, scoring="relu"),  # type: ignore[arg-type]
            lambda: MixtureOfExperts(8, 8, 4, 2, balance="los"),  # type: ignore[arg-type]
            lambda: MixtureOfExperts(8, 8, 4, 2, z_loss=-1.0),
            lambda: MixtureOfExperts(8, 0, 4, 2),
            lambda: MixtureOfExperts(8, 8, 4, 2, capacity="1"),  # type: ignore[arg-type]
            lambda: lockstep.expert_parallel([MixtureOfExperts(8, 8, 4, 2)]),  # type: ignore[arg-type]
            lambda: lockstep.expert_parallel(nn.Linear(2, 2)),
            lambda: lockstep.expert_parallel(MixtureOfExperts(8, 8, 4, 2), gradients="average"),  # type: ignore
        ]
    )
    assert [line.partition(",")[0] for line in said] == [
        "active is 5",
        "active is 0",
        "capacity is 0.0",
        "scoring is 'relu'",
        "balance is 'los'",
        "z_loss is -1.0",
        "d_ff is 0",
        "capacity is '1'",
        "expert_parallel takes a module",
        "Linear has no MixtureOfExperts to spread; make the blocks' MLPs lockstep.MixtureOfExperts first",
        "gradients is 'average'",
    ]
    assert all("\n" not in line for line in said)
