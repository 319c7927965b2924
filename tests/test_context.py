"""Context parallelism by hand: ring and Ulysses attention against ordinary attention over the whole sequence."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import UserError, gather_sequence, ring_attention, shard_sequence, ulysses_attention
from lockstep.comm.ledger import Ledger, recording
from lockstep.layout.world import World
from lockstep.parallel.context import attention_block
from lockstep.parallel.context.context_parallel import positions_of
from tests.ranks import on_ranks, refused

WAYS = {"ring": ring_attention, "ulysses": ulysses_attention}
CASES = [(causal, kv_heads) for causal in (True, False) for kv_heads in (4, 2, 1)]


def tensors(kv_heads: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(2, heads, length, 8) for heads in (4, kv_heads, kv_heads, 4)]
    q, k, v, gradient = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q, k, v, gradient


def check_equal(world: World, way: str, causal: bool, kv_heads: int) -> None:
    length = 4 * world.size * 2
    q, k, v, gradient = tensors(kv_heads, length)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    expected.backward(gradient)
    mine = [shard_sequence(t, 2).clone().requires_grad_() for t in (q, k, v)]
    out = WAYS[way](*mine, causal=causal)
    out.backward(shard_sequence(gradient, 2))
    assert torch.allclose(gather_sequence(out, 2), expected, atol=1e-12), "outputs"
    for name, part, full in zip("qkv", mine, whole, strict=True):
        assert part.grad is not None
        assert full.grad is not None
        assert torch.allclose(part.grad, shard_sequence(full.grad, 2), atol=1e-12), f"gradient of {name}"


def check_all(world: World) -> None:
    for way in WAYS:
        for causal, kv_heads in CASES:
            if way == "ulysses" and world.size == 3:
                continue  # 4 heads
            try:
                check_equal(world, way, causal, kv_heads)
            except Exception as error:
                raise AssertionError(f"{way}, causal {causal}, {kv_heads} key heads: {error}") from error
    tokens = torch.arange(24 * world.size).view(3, -1)
    assert torch.equal(gather_sequence(shard_sequence(tokens, 1), 1), tokens)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_to_attention_over_the_whole_sequence(ranks: int) -> None:
    on_ranks(check_all, ranks)


def test_zig_zag() -> None:
    assert positions_of(0, 2, 8).tolist() == [0, 1, 6, 7]
    assert positions_of(1, 2, 8).tolist() == [2, 3, 4, 5]
    with pytest.raises(UserError, match="10 positions cannot be cut into 4 equal chunks"):
        positions_of(0, 2, 10)


def kept_bytes(world: World) -> tuple[int, int, list[tuple[str, str, int]]]:
    """(bytes that forward keeps for backward, of a sequence of one length; messages of forward and backward)."""
    q, k, v, _ = (t.requires_grad_() for t in tensors(4, 64))
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    mine = [shard_sequence(t.detach(), 2).requires_grad_() for t in (q, k, v)]
    with recording(Ledger()) as ledger:
        ledger.open()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = ring_attention(*mine)
        forward = len(ledger.entries)
        out.sum().backward()
    return sum(kept.values()), forward, [(e.operation, e.axis, e.nbytes) for e in ledger.entries]


def test_memory_falls_with_the_ranks_and_keys_go_round_once_each_way() -> None:
    one, two, four = (on_ranks(kept_bytes, n)[0] for n in (1, 2, 4))
    assert two[0] == pytest.approx(one[0] / 2, rel=0.05)
    assert four[0] == pytest.approx(one[0] / 4, rel=0.05)
    part = 2 * 2 * 4 * 16 * 8 * 8  # keys and values: batch x heads x positions x dim in fp64
    assert four[1] == 3
    assert four[2] == [("send", "cp", part)] * (3 + 3 + 3)


def test_a_block_by_hand_is_the_kernels() -> None:
    """What computes where there is no kernel, against the CPU's."""
    q, k, v, gradient = tensors(4, 16)
    for causal in (True, False):
        out, lse = attention_block.attention_block(q, k, v, causal)
        scores = attention_block.masked_scores(q, k, causal)
        assert torch.allclose(scores.logsumexp(-1), lse, atol=1e-12)
        found = attention_block.attention_block_backward(gradient, q, k, v, out, lse, causal)
        by_hand = attention_block.backward_by_hand(gradient, q, k, v, out, lse, causal)
        for a, b in zip(found, by_hand, strict=True):
            assert torch.allclose(a, b, atol=1e-12)


def refusals(world: World) -> list[str]:
    given = (("ring", 4, 3, 4), ("ring", 2, 2, 3), ("ulysses", 3, 3, 4))
    tries = []
    for way, heads, kv_heads, length in given:
        q, k = torch.randn(1, heads, length, 8), torch.randn(1, kv_heads, length, 8)
        tries.append(partial(WAYS[way], q, k, k))
    return refused(tries)


def test_mistakes_are_named() -> None:
    for said in on_ranks(refusals, 2):
        assert "4 heads of queries cannot share 3 heads of keys" in said[0]
        assert "3 positions, but zig-zag has two equal chunks" in said[1]
        assert "3 do not divide; use ring" in said[2]
