"""Sums over the ranks of which only a part travels: numbers in few bits, or only the largest numbers.

Each function begins to send, and returns another one that waits for it and gives two arrays: the sum, the same on every
rank, and what this rank has not sent. Added to the next array (error feedback), that loses nothing: summed over ranks
and steps, sent + kept = given.

# Note: numbers in few bits

A block of 256 numbers has one scale, in fp32, and a code of 8, 4, 2 or 1 bits for each number:

    8, 4 bits    code x scale, with whole codes from -t to t, t = 2^(bits - 1) - 1; scale = max|x| / t
    2 bits       ±1/4 and ±3/4 of max|x|
    1 bit        a sign; scale = mean|x|

So a number moves by max|x| / 2t at most (8 and 4 bits), by max|x| / 4 (2 bits), where the maximum is the block's.
"""

from collections.abc import Callable
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.comm.collectives import all_gather, all_gather_async, all_to_all_async
from lockstep.layout.group import Group
from lockstep.parallel.data.law import BLOCK, CHUNK

Finish = Callable[[], tuple[Tensor, Tensor]]
"""Waits; (sum over the ranks, what this rank keeps)."""


def sum_in_few_bits(flat: Tensor, bits: int, group: Group, purpose: str) -> Finish:
    """As ZeRO++'s qgZ: rank r sums the r-th parts of all, which travel in few bits, and so does its sum.

    What a rank loses of its sum, when that is rounded, it keeps as well.
    """
    if group.size == 1 or not len(flat):
        return lambda: (flat, torch.zeros_like(flat))
    parts = padded(flat, group.size * BLOCK).view(group.size, -1)
    codes = encoded(parts, bits, len(flat))
    unsent = parts - decoded(codes, bits, flat.dtype)
    arrived = torch.empty_like(codes)
    pending = all_to_all_async(arrived, codes, group, purpose=purpose)

    def finish() -> tuple[Tensor, Tensor]:
        pending.wait()
        mine = decoded(arrived, bits, flat.dtype).sum(0, keepdim=True)
        real = max(0, len(flat) - group.rank * mine.shape[1])
        mine[0, real:] = 0  # a sign is no zero
        code = encoded(mine, bits, real)
        sums = decoded(all_gather(code[0], group, purpose=purpose), bits, flat.dtype)
        unsent[group.rank] += mine[0] - sums[group.rank]
        return sums.view(-1)[: len(flat)], unsent.view(-1)[: len(flat)]

    return finish


def sum_of_largest(flat: Tensor, density: float, bits: int, group: Group, purpose: str) -> Finish:
    """Of each chunk of 4,096 numbers every rank sends the largest: where they stand, in two bytes, and what they are,
    in `bits` (32: as they are).
    """
    if not len(flat):
        return lambda: (flat, torch.zeros_like(flat))
    chunks = padded(flat, CHUNK).view(-1, CHUNK)
    places = chunks.abs().topk(kept_of_chunk(density), dim=1, sorted=False).indices
    values = chunks.gather(1, places)
    packed = padded(values.reshape(-1), BLOCK)[None]
    codes = packed.view(torch.uint8) if bits == 32 else encoded(packed, bits, values.numel())
    sent = values if bits == 32 else decoded(codes, bits, flat.dtype).view(-1)[: values.numel()].view_as(values)
    message = torch.cat([places.to(torch.int16).view(torch.uint8).view(-1), codes.view(-1)])
    messages, pending = all_gather_async(message, group, purpose=purpose)

    def finish() -> tuple[Tensor, Tensor]:
        pending.wait()
        total = torch.zeros_like(chunks)
        for theirs in messages:  # in the same order on every rank
            where = theirs[: 2 * places.numel()].view(torch.int16).view_as(places).long()
            what = theirs[2 * places.numel() :].clone().view(1, -1)
            numbers = what.view(flat.dtype) if bits == 32 else decoded(what, bits, flat.dtype)
            total.scatter_add_(1, where, numbers.view(-1)[: places.numel()].view_as(places))
        unsent = chunks.scatter(1, places, values - sent)
        return total.view(-1)[: len(flat)], unsent.view(-1)[: len(flat)]

    return finish


def kept_of_chunk(density: float) -> int:
    return min(CHUNK, max(1, ceil(density * CHUNK)))


def padded(flat: Tensor, multiple: int) -> Tensor:
    """With zeros, to a multiple of that length."""
    return F.pad(flat, (0, -len(flat) % multiple))


def encoded(rows: Tensor, bits: int, real: int) -> Tensor:
    """(rows, bytes): of each row all codes, then all scales. `real`: how many numbers there were before the padding."""
    blocks = rows.view(len(rows), -1, BLOCK)
    blocks = blocks if blocks.dtype == torch.float64 else blocks.float()
    if bits == 1:
        begins = torch.arange(0, rows.numel(), BLOCK, device=rows.device).view(blocks.shape[:2])
        scales = blocks.abs().sum(-1) / (real - begins).clamp(1, BLOCK)
    else:
        scales = blocks.abs().amax(-1) / steps_of(bits)
    scales = scales.float()
    shares = (blocks / scales.to(blocks.dtype).unsqueeze(-1)).nan_to_num_(0.0)  # a block of zeros
    if bits <= 2:
        codes = shares.floor().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 2 ** (bits - 1)
    else:
        codes = shares.round().clamp_(-steps_of(bits), steps_of(bits)) + steps_of(bits)
    in_bytes = codes.to(torch.int32).view(len(rows), -1, 8 // bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=rows.device)
    packed = (in_bytes << shifts).sum(-1).to(torch.uint8)
    return torch.cat([packed, scales.view(torch.uint8).view(len(rows), -1)], 1)


def decoded(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """(rows, numbers). A scale that is not finite makes its whole block so."""
    count = codes.shape[1] // (BLOCK * bits // 8 + 4)  # blocks
    packed, scales = codes.split([count * BLOCK * bits // 8, count * 4], 1)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    found = (packed.to(torch.int32).unsqueeze(-1) >> shifts) & (2**bits - 1)
    found = found.view(len(codes), count, BLOCK)
    scale = scales.contiguous().view(torch.float32).to(dtype).unsqueeze(-1)
    if bits == 1:
        return ((2 * found - 1) * scale).view(len(codes), -1)
    offset = steps_of(bits) if bits > 2 else 2 ** (bits - 1) - 0.5
    return ((found - offset).to(dtype) * scale).view(len(codes), -1)


def steps_of(bits: int) -> int:
    """From zero to the largest number of a block."""
    return 2 ** (bits - 1) - 1 if bits > 2 else bits


def largest_error(flat: Tensor, bits: int) -> Tensor:
    """By how much each number moves at most, in 8, 4 and 2 bits; of what is padded as well."""
    blocks = padded(flat, BLOCK).view(-1, BLOCK).abs().amax(-1)
    return (blocks / (2 * steps_of(bits))).repeat_interleave(BLOCK)[: len(flat)]
