"""Tensor, sequence, pipeline and context parallelism on a GPU: the branches that only CUDA takes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lockstep import ring_attention, shard_sequence
from lockstep.data import build_data, read_share
from lockstep.layout.group import group_of
from lockstep.layout.world import World
from lockstep.parallel.context.attention_block import (
    attention_block,
    attention_block_backward,
    backward_by_hand,
    has_flash,
)
from lockstep.parallel.pipeline.messages import directions
from lockstep.parallel.tensor.parallel_products import halves
from lockstep.training.prepare import prepare_strategy
from lockstep.verify import Request, verify
from lockstep.verify.pipelines import Executed
from lockstep.verify.presets import AXES_AT_2
from tests.gpu import NEEDS_GPU, on_gpu, short_gpt

pytestmark = NEEDS_GPU

AXES = {
    2: [*AXES_AT_2, "single,pp=2:1f1b:native"],
    4: [
        *(
            "single,tp=4",
            "bucketed,cp=4",
            "zero3,tp=2:sequence",
            "zero2,pp=2:1f1b",
            "fsdp,cp=2",
            "zero1,pp=2:zb-h1,tp=2",
        ),
        *("bucketed,pp=2:interleaved", "ddp,pp=2:1f1b", "zero3,pp=2:1f1b", "fsdp,pp=2:zb-h1"),
        "single,pp=2:zb-h1,tp=2:sequence",
    ],
}


@pytest.mark.parametrize("ranks", AXES)
def test_every_axis_equals_one_process_on_nccl(ranks: int) -> None:
    """Tensor, sequence, pipeline and context parallelism; on a GPU batches travel in two halves (`halves`), and
    activations and gradients in groups of their own (`directions`), which the traffic and the worker are held to.
    """
    for verdict in on_gpu(verify, ranks, Request(AXES[ranks], steps=4))[0]:
        assert verdict.passed, f"{verdict.strategy}: {verdict.failures}"


def branches(world: World) -> dict[str, Any]:
    """Which way the code takes here: in how many pieces a batch travels, over which groups messages go."""
    group = group_of(dist.group.WORLD, "pp")
    later, earlier = directions(group, world.device)
    x = torch.zeros(4, 8, 16, device=world.device)
    return {
        "pieces": [len(part) for part in halves(x)],
        "one row": len(halves(x[:1])),
        "groups": len({id(g.native) for g in (group, later, earlier)}),
    }


def test_branches_that_only_a_gpu_takes() -> None:
    assert on_gpu(branches, 2) == [{"pieces": [2, 2], "one row": 1, "groups": 3}] * 2


def check_flash(world: World, head_size: int) -> None:
    """Ring attention in bf16, on flash kernels block by block, against fp32 attention over the whole sequence."""
    generator = torch.Generator().manual_seed(head_size)
    for causal, kv_heads in ((True, 4), (False, 4), (True, 2)):
        length = 64 * world.size
        shapes = [(2, heads, length, head_size) for heads in (4, kv_heads, kv_heads, 4)]
        q, k, v, slope = (torch.randn(s, generator=generator).to(world.device, torch.bfloat16) for s in shapes)
        assert has_flash(q) == (head_size % 8 == 0)
        whole = [t.float().requires_grad_() for t in (q, k, v)]
        expected = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
        expected.backward(slope.float())
        mine = [shard_sequence(t, 2).clone().requires_grad_() for t in (q, k, v)]
        out = ring_attention(*mine, causal=causal)
        out.backward(shard_sequence(slope, 2))
        pairs = [(out, shard_sequence(expected, 2))]
        pairs += [(a.grad, shard_sequence(b.grad, 2)) for a, b in zip(mine, whole, strict=True)]  # type: ignore[misc]
        for got, right in pairs:
            error = float((got.float() - right).norm() / right.norm())
            assert error < 2e-2, f"causal {causal}, {kv_heads} key heads: {error:.1e}"


@pytest.mark.parametrize(("ranks", "head_size"), [(1, 64), (2, 64), (3, 64), (2, 20)])
def test_ring_attention_on_flash_kernels(ranks: int, head_size: int) -> None:
    on_gpu(check_flash, ranks, head_size)


def check_block(world: World) -> None:
    """A block's kernel and what one does without one give the same, forward and backward."""
    torch.manual_seed(1)
    q, k, v, slope = (torch.randn(2, 3, 48, 64, device=world.device, dtype=torch.bfloat16) for _ in range(4))
    for causal in (True, False):
        out, lse = attention_block(q, k, v, causal)
        wide = [t.double() for t in (q, k, v)]
        right, sums = attention_block(*wide, causal)  # no kernel takes fp64
        torch.testing.assert_close(out.double(), right, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=1e-3)
        got = attention_block_backward(slope, q, k, v, out, lse, causal)
        by_hand = backward_by_hand(slope.double(), *wide, right, sums, causal)
        for a, b in zip(got, by_hand, strict=True):
            assert float((a.double() - b).norm() / b.norm()) < 2e-2


def test_a_block_of_attention_by_its_kernel_and_by_hand() -> None:
    on_gpu(check_block, 1)


def zero_bubble(world: World, name: str) -> tuple[list[float], int]:
    """Losses in bf16, and the products that the weights' pass has computed on this rank."""
    config = short_gpt(f"single,pp=2:{name}", "none", "bf16")
    dataset = build_data(config)
    strategy = prepare_strategy(world, config, dataset)
    batch = read_share(dataset.train, torch.arange(config.train.batch_size), strategy.batch_share())
    losses = [strategy.step(batch).loss for _ in range(3)]
    worker: Any = strategy.worker
    with Executed(worker) as executed:
        strategy.step(batch)
    return losses, executed.products_of_weights


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_zero_bubble_schedules_defer_products_on_a_gpu(name: str) -> None:
    plain = on_gpu(zero_bubble, 2, "1f1b")[0][0]
    for losses, products in on_gpu(zero_bubble, 2, name):
        assert losses == pytest.approx(plain, abs=0.02)
        assert products > 0
