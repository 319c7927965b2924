"""Closed forms of what a step sends, per rank: the numbers that the ledger's counts are held against.

Ψ is the number of trainable elements, P the number of trainable parameters, n the number of ranks. An all-reduce of S
bytes costs each rank 2S(n-1)/n on the wire, an all-gather to S bytes S(n-1)/n. Our own modes send Ψ gradients and P
flags ("used on this rank"), overlap and bucketed one flag more ("came late"); PyTorch's DDP sends Ψ.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import nn

from lockstep.comm.ledger import Traffic
from lockstep.config import Parallel
from lockstep.parallel.blocks import blocks_of
from lockstep.parallel.bucket import FIRST_BUCKET_SHARE
from lockstep.parallel.local_sgd import CHUNK_BYTES


@dataclass
class Theory:
    """What one rank sends in one step by theory."""

    collectives: int | None
    """None: the engine decides, and only the bytes are held to theory."""
    wire_bytes: float

    def matches(self, counted: Traffic) -> bool:
        same_count = self.collectives is None or self.collectives == counted.collectives
        return same_count and abs(self.wire_bytes - counted.wire_bytes) < 0.5


def bucket_sizes(sizes: list[int], itemsize: int, bucket_mb: float, first_share: float = 1.0) -> list[list[int]]:
    """Elements of each parameter of each bucket: filled from the last parameter on, closed when the cap is reached."""
    cap = bucket_mb * 1024 * 1024 / itemsize
    buckets: list[list[int]] = [[]]
    for size in reversed(sizes):
        buckets[-1].append(size)
        if sum(buckets[-1]) >= (cap * first_share if len(buckets) == 1 else cap):
            buckets.append([])
    return [b for b in buckets if b]


def expected_traffic(model: nn.Module, parallel: Parallel, n: int, compute: torch.dtype | None = None) -> Theory | None:
    """What theory says about one step of `parallel` with `n` ranks (one dtype, no buffers, every parameter used).

    `compute`: what forward and backward compute in, where it is not the parameters' dtype. Parameters gathered for it
    travel in it, and zero3's gradients; others' travel as the parameters are, or compressed.

    Returns None where there is no closed form here (yet).
    """
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    sizes = [s.numel() for s in shapes]
    itemsize = next(model.parameters()).element_size()
    gathered = itemsize if compute is None else compute.itemsize
    psi, count = sum(sizes), len(sizes) + (parallel.data in ("overlap", "bucketed"))
    if n == 1:
        return Theory(0, 0.0)
    reduce, gather = 2 * (n - 1) / n, (n - 1) / n
    match parallel.data:
        case "single":
            return Theory(0, 0.0)
        case "zero1" | "zero2":  # the gradients to their owners, the parameters back, and which were used
            buckets = bucket_sizes(sizes, itemsize, parallel.bucket_mb, FIRST_BUCKET_SHARE)
            elements = sum(padded(bucket, itemsize, n) for bucket in buckets)
            return Theory(2 * len(buckets) + 1, gather * 2 * elements * itemsize + reduce * (count + 1) * 4)
        case "zero3":  # blocks: gathered for forward and backward, and reduced; the rest: gathered once, and reduced
            blocks, outside = unit_sizes(model)
            times = 3 if parallel.sharding == "FULL_SHARD" else 2
            elements = times * sum(padded(block, gathered, n) for block in blocks)
            elements += 2 * sum(padded(rest, gathered, n) for rest in outside)
            collectives = times * len(blocks) + 2 * len(outside) + 1
            return Theory(collectives, gather * elements * gathered + reduce * (count + 1) * 4)
        case "fsdp":
            return fsdp_traffic(model, parallel, n, itemsize, gathered)
        case "zero1_torch":  # DDP, and every parameter broadcast by its owner
            return Theory(None, (reduce + 1) * psi * itemsize)
        case "ddp":
            return Theory(None, reduce * psi * itemsize)
        case "local_sgd":  # a step with a meeting; steps between meetings send nothing
            chunks = bucket_sizes(sizes, itemsize, CHUNK_BYTES / 1024**2)
            return Theory(len(chunks), reduce * psi * itemsize)
        case "naive" | "overlap":
            buckets = [[size] for size in sizes]
        case "flat":
            buckets = [sizes]
        case "bucketed":
            buckets = bucket_sizes(sizes, itemsize, parallel.bucket_mb, FIRST_BUCKET_SHARE)
        case _:
            return None
    match parallel.compression:
        case "bf16" | "fp16":
            return Theory(len(buckets), reduce * (psi + count) * 2)
        case "topk":
            kept = sum(min(sum(b), max(1, ceil(parallel.topk_ratio * sum(b)))) for b in buckets)
            pairs = gather * n * kept * (itemsize + 4)  # a value and an int32 index, from each of n ranks
            return Theory(3 * len(buckets), pairs + reduce * count * itemsize)
        case "powersgd":
            sent, rounds = count, 0
            per_bucket = iter(reversed(shapes))
            for bucket in buckets:
                thin = [powersgd_elements(next(per_bucket), parallel.powersgd_rank) for _ in bucket]
                sent += sum(elements for elements, _ in thin)
                rounds += 2 if any(compressed for _, compressed in thin) else 1
            return Theory(rounds, reduce * sent * itemsize)
    return Theory(len(buckets), reduce * (psi + count) * itemsize)


def unit_sizes(model: nn.Module) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes of the parameters of each block, and of what lies outside all blocks."""
    blocks = [block for _, block in blocks_of(model)]
    inside = {p for block in blocks for p in block.parameters()}
    outside = [p.numel() for p in model.parameters() if p not in inside]
    return [[p.numel() for p in block.parameters()] for block in blocks], [outside] if outside else []


def fsdp_traffic(model: nn.Module, parallel: Parallel, n: int, itemsize: int, gathered: int) -> Theory | None:
    """FSDP2 cuts each parameter along its first dimension, and pads that.

    `itemsize`, `gathered`: bytes of an element of a gradient, and of a parameter on its way.
    """
    if parallel.sharding in ("HYBRID_SHARD", "NO_SHARD"):
        return None  # all-reduces between the copies, which FSDP2 does out of sight
    blocks = [block for _, block in blocks_of(model)]
    inside = {p for block in blocks for p in block.parameters()}
    in_blocks = sum(ceil(p.shape[0] / n) * n * p.shape[1:].numel() for p in inside)
    outside = sum(ceil(p.shape[0] / n) * n * p.shape[1:].numel() for p in model.parameters() if p not in inside)
    times = 2 if parallel.sharding == "FULL_SHARD" else 1
    parameters, gradients = times * in_blocks + outside, in_blocks + outside
    return Theory(None, (n - 1) / n * (parameters * gathered + gradients * itemsize))


def padded(sizes: list[int], itemsize: int, n: int) -> int:
    """Elements of tensors laid end to end, each begun at a multiple of 16 bytes, all filled up to n equal parts."""
    align, end = max(1, 16 // itemsize), 0
    for size in sizes:
        end = ceil(end / align) * align + size
    return ceil(end / n) * n


def powersgd_elements(shape: tuple[int, ...], rank: int) -> tuple[int, bool]:
    """(elements sent for one parameter, whether it is sent as two thin factors)."""
    total = 1
    for size in shape:
        total *= size
    if len(shape) < 2:
        return total, False
    rows, columns = shape[0], total // shape[0]
    thin = (rows + columns) * min(rank, rows, columns)
    return (thin, True) if thin < total else (total, False)
