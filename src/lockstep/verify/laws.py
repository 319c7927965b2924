"""Strategies that are not equal to one process by nature, and the law that each is held to instead."""

import copy
from dataclasses import replace
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.apart import relative
from lockstep.comm.collectives import all_gather_objects, all_reduce
from lockstep.config import Parallel
from lockstep.data import Share
from lockstep.layout.world import World
from lockstep.parallel.data.bucket import Bucket
from lockstep.parallel.data.compression import ErrorFeedback, make_reducer
from lockstep.parallel.data.demo import DECAY, DeMo
from lockstep.parallel.data.exchange import partners
from lockstep.parallel.data.few_bits import largest_error, padded
from lockstep.parallel.data.law import BLOCK, CHUNK, FREQUENCIES, fragments_of
from lockstep.parallel.data.reducer import Reducer
from lockstep.strategies import STRATEGIES
from lockstep.strategies.model_sizes import ModelSizes
from lockstep.strategies.table import Table
from lockstep.verify.compare import TOLERANCE, spread
from lockstep.verify.reference import Reference
from lockstep.verify.scenarios import SMALL_CNN, Scenario

FEEDBACK_STEPS = 6


def check_law(world: World, parallel: Parallel, precision: str) -> str | None:
    """Hold a compression to its law on gradients made for the purpose; None, or how it was broken."""
    if parallel.compression == "none":
        return None  # its law is its equal form
    dtype = torch.float64 if precision == "fp64" else torch.float32
    if parallel.compression in ("bf16", "fp16"):
        broken = _rounding(world, parallel, dtype)
    elif parallel.compression == "demo":
        broken = _signs_of_sums(world, dtype, TOLERANCE[precision])
    else:
        broken = _nothing_is_lost(world, parallel, dtype, TOLERANCE[precision])
        if not any(all_gather_objects(broken is not None)) and parallel.compression == "int8":
            broken = _within_the_format(world, dtype)
        if not any(all_gather_objects(broken is not None)) and parallel.compression == "powersgd":
            broken = _low_rank_is_exact(world, parallel, dtype, TOLERANCE[precision])
    return next((b for b in all_gather_objects(broken) if b is not None), None)


def _bucket(dtype: torch.dtype, device: torch.device) -> Bucket:
    shapes = ((24, 16), (16,), (8, 4, 3, 3))
    return Bucket([nn.Parameter(torch.zeros(s, dtype=dtype, device=device)) for s in shapes])


def _random_gradients(bucket: Bucket, world: World, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + world.rank)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in bucket.parameters]


def _reduced(bucket: Bucket, gradients: list[Tensor], reducer: Reducer) -> tuple[Tensor, Tensor]:
    """(what the reducer makes of the ranks' gradients, their true mean)."""
    for index, gradient in enumerate(gradients):
        bucket.parameters[index].grad = gradient.to(bucket.buffer)
        bucket.place(index)
    bucket.raise_flags()
    mean = all_reduce(bucket.gradients.clone(), purpose="check")
    bucket.finish = reducer.start(bucket)
    bucket.hand_over()
    return bucket.gradients.clone(), mean


def _rounding(world: World, parallel: Parallel, dtype: torch.dtype) -> str | None:
    bucket = _bucket(dtype, world.device)
    got, mean = _reduced(bucket, _random_gradients(bucket, world, 0), make_reducer(parallel.compression, 0.0, 1))
    unit = 2.0**-8 if parallel.compression == "bf16" else 2.0**-11
    error = float((got - mean).norm() / mean.norm())
    allowed = unit * max(1.0, world.size / 4)  # each number is rounded by half a unit at most, and so is each sum
    return None if error <= allowed else f"relative error {error:.1e} exceeds {allowed:.1e}"


def _nothing_is_lost(world: World, parallel: Parallel, dtype: torch.dtype, tolerance: float) -> str | None:
    """Over several steps: what was sent plus what the ranks keep is the sum of all mean gradients."""
    bucket = _bucket(dtype, world.device)
    reducer = make_reducer(parallel.compression, 0.1, 2)
    assert isinstance(reducer, ErrorFeedback)
    sent, given = torch.zeros_like(bucket.gradients), torch.zeros_like(bucket.gradients)
    for step in range(FEEDBACK_STEPS):
        got, mean = _reduced(bucket, _random_gradients(bucket, world, step), reducer)
        sent, given = sent + got, given + mean
    assert reducer.residual is not None
    kept = all_reduce(copy.deepcopy(reducer.residual), purpose="check")
    lost = relative(sent + kept, given)
    return None if lost <= tolerance else f"error feedback lost {lost:.1e} over {FEEDBACK_STEPS} steps"


def _within_the_format(world: World, dtype: torch.dtype) -> str | None:
    """Each element is rounded on every rank, and once more in the sum: by half a step of its block each."""
    bucket = _bucket(dtype, world.device)
    got, mean = _reduced(bucket, _random_gradients(bucket, world, 0), make_reducer("int8", 0.0, 1))
    mine = torch.cat([g.reshape(-1) for g in _random_gradients(bucket, world, 0)]).to(mean) / world.size
    rounded = all_reduce(largest_error(padded(mine, world.size * BLOCK), 8), purpose="check")
    allowed = rounded + largest_error(padded(mean.abs(), world.size * BLOCK) + rounded, 8)
    beyond = ((got - mean).abs() / allowed[: len(mean)]).max()
    return None if beyond <= 1 + 1e-4 else f"an element is {float(beyond):.2f} times as far off as 8 bits allow"


def _signs_of_sums(world: World, dtype: torch.dtype, tolerance: float) -> str | None:
    """With all frequencies, the signs of the mean gradient; with some, what was sent and what is kept is momentum."""
    bucket = _bucket(dtype, world.device)
    got, mean = _reduced(bucket, _random_gradients(bucket, world, 0), DeMo(FREQUENCIES))
    if not torch.equal(got, mean.sign()):
        return "with all frequencies it is not the sign of the mean gradient"
    reducer = DeMo(7)
    momentum = torch.zeros_like(mean)
    for step in range(FEEDBACK_STEPS):
        got, mean = _reduced(bucket, _random_gradients(bucket, world, step), reducer)
        assert reducer.momentum is not None
        momentum = DECAY * momentum + mean
        kept = all_reduce(reducer.momentum.clone(), purpose="check").view(-1)[: len(mean)]
        sent = momentum - kept
        clear = sent.abs() > tolerance * sent.abs().max()
        if not torch.equal(got[clear], sent[clear].sign()):
            return f"step {step + 1} does not go by the signs of what ranks took out of their momenta"
        momentum = kept
    return None


def _low_rank_is_exact(world: World, parallel: Parallel, dtype: torch.dtype, tolerance: float) -> str | None:
    """Rank-1 gradients with one common row space must pass a rank-2 approximation unharmed."""
    bucket = _bucket(dtype, world.device)
    reducer = make_reducer(parallel.compression, 0.1, 2)
    common = torch.Generator().manual_seed(5)
    values = []
    for parameter, own in zip(bucket.parameters, _random_gradients(bucket, world, 0), strict=True):
        row = torch.randn(1, parameter.numel() // parameter.shape[0], generator=common, dtype=torch.float64)
        values.append((own.flatten(1).sum(1, keepdim=True) @ row).view_as(own) if own.dim() > 1 else own)
    got, mean = _reduced(bucket, values, reducer)
    error = relative(got, mean)
    return None if error <= tolerance else f"a gradient of rank 1 came back wrong by {error:.1e}"


# ---- ranks that train apart ----------------------------------------------------------------------------------------

APART_STEPS, APART_EVERY = 6, 2


def check_apart(world: World, parallel: Parallel, precision: str, table: Table = STRATEGIES) -> str | None:
    """Rounds of two steps, against as many workers in one process: who averages what when, an outer optimizer with
    Nesterov's momentum, and what is kept, all written out. And the bytes of a round.
    """
    scenario = Scenario("apart", SMALL_CNN, (4 * world.size,))
    reference = Reference(world, scenario, 1, precision, "sgd")
    parallel = replace(parallel, sync_every=APART_EVERY, outer_delay=min(parallel.outer_delay, APART_EVERY - 1))
    strategy = spread(reference, parallel, table)
    workers = [scenario.build(seed=0).to(world.device, reference.dtype) for _ in range(world.size)]
    optimizers = [reference.make_optimizer(worker.parameters()) for worker in workers]
    simulated = Apart(parallel, [list(worker.parameters()) for worker in workers])
    sent = 0.0
    for step in range(APART_STEPS):
        batch = scenario.global_batch(step).to(world.device, reference.dtype)
        strategy.step(batch.share(strategy.batch_share()))
        sent += strategy.ledger.traffic("data").wire_bytes if step >= APART_STEPS - APART_EVERY else 0.0
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            mine = batch.share(Share(rank, world.size))
            optimizer.zero_grad()
            F.cross_entropy(worker(mine.inputs), mine.targets).backward()
            optimizer.step()
        simulated.after(step + 1)
    held = strategy.held()
    for name, parameter in workers[world.rank].named_parameters():
        error = relative(held[name].tensor, parameter.detach())
        if error > TOLERANCE[precision]:
            return f"after {APART_STEPS} steps {name} is {error:.1e} away from {world.size} simulated workers"
    expected = table[parallel.data].traffic(ModelSizes.of(workers[0]), parallel, world.size)
    is_even = not parallel.gossip or world.size % 2 == 0  # else one rank keeps to itself
    if expected is not None and is_even and abs(sent - expected.wire_bytes) > 0.5:
        return f"{APART_EVERY} steps have sent {sent:,.0f} bytes, and theory says {expected.wire_bytes:,.0f}"
    return None


class Apart:
    """Workers of one process, which know each other's parameters."""

    def __init__(self, parallel: Parallel, workers: list[list[nn.Parameter]]) -> None:
        self.parallel, self.workers = parallel, workers
        self.starts = [[p.detach().clone() for p in worker] for worker in workers]
        self.momenta = [[torch.zeros_like(p) for p in worker] for worker in workers]
        self.kept: dict[tuple[int, int], Tensor] = {}
        self.on_the_way: dict[int, list[list[Tensor]]] = {}
        """Of each fragment, and each worker, the mean that it will take."""

    @torch.no_grad()
    def after(self, step: int) -> None:
        asked = self.parallel
        fragments = fragments_of([p.numel() for p in self.workers[0]], asked.fragments)
        for index, numbers in enumerate(fragments):
            phase = (step - index * asked.sync_every // len(fragments)) % asked.sync_every
            if phase == 0:
                self.on_the_way[index] = self._means(index, numbers, step)
            if phase == asked.outer_delay and index in self.on_the_way:
                for worker, means in enumerate(self.on_the_way.pop(index)):
                    self._take(worker, numbers, means)

    def _means(self, index: int, numbers: list[int], step: int) -> list[list[Tensor]]:
        asked, n = self.parallel, len(self.workers)
        changes = [
            [(self.starts[w][i] if asked.outer_lr else 0) - (1 if asked.outer_lr else -1) * worker[i] for i in numbers]
            for w, worker in enumerate(self.workers)
        ]
        if n == 1:
            return changes  # nothing travels, so nothing is rounded
        if asked.gossip:
            pairs = partners(n, step)
            together = [[(a + b) / 2 for a, b in zip(changes[w], changes[pairs[w]], strict=True)] for w in range(n)]
            starts = [[(self.starts[w][i] + self.starts[pairs[w]][i]) / 2 for i in numbers] for w in range(n)]
            for w in range(n):
                for i, start in zip(numbers, starts[w], strict=True):
                    self.starts[w][i].copy_(start)
            return together
        # An array is laid out from the last parameter on.
        flat = [torch.cat([c.reshape(-1) for c in reversed(mine)]) / n for mine in changes]
        flat = [array + self.kept.get((w, index), 0.0) for w, array in enumerate(flat)]
        sent = [self._as_sent(array) for array in flat]
        total = torch.stack(sent).sum(0)
        mean = self._as_sent(total) if asked.outer_density == 1 and asked.outer_bits < 32 else total
        part = -(-len(mean) // (n * BLOCK)) * BLOCK  # of the sum, which one worker rounds
        for w in range(n):
            self.kept[w, index] = flat[w] - sent[w]
            mine = slice(w * part, (w + 1) * part)
            self.kept[w, index][mine] += (total - mean)[mine]
        sizes = [self.workers[0][i].numel() for i in reversed(numbers)]
        split = list(reversed(mean.split(sizes)))
        shaped = [p.view_as(self.workers[0][i]) for i, p in zip(numbers, split, strict=True)]
        return [shaped] * n

    def _as_sent(self, array: Tensor) -> Tensor:
        """What arrives of an array."""
        asked = self.parallel
        if asked.outer_density < 1:
            chunks = F.pad(array, (0, -len(array) % CHUNK)).view(-1, CHUNK)
            kept = min(CHUNK, max(1, ceil(asked.outer_density * CHUNK)))
            places = chunks.abs().topk(kept, sorted=False).indices
            values = chunks.gather(1, places)
            values = rounded(values.reshape(-1), asked.outer_bits).view_as(values)
            return torch.zeros_like(chunks).scatter(1, places, values).view(-1)[: len(array)]
        return rounded(array, asked.outer_bits)

    def _take(self, worker: int, numbers: list[int], means: list[Tensor]) -> None:
        asked = self.parallel
        for i, mean in zip(numbers, means, strict=True):
            parameter, start, momentum = self.workers[worker][i], self.starts[worker][i], self.momenta[worker][i]
            if asked.outer_lr:
                momentum.mul_(asked.outer_momentum).add_(mean)
                start.sub_(asked.outer_lr * (mean + asked.outer_momentum * momentum))
                mean = (start + parameter) / 2 if asked.outer_delay else start
            parameter.copy_(mean)


def rounded(array: Tensor, bits: int) -> Tensor:
    """Block by block, by the definition."""
    if bits == 32:
        return array
    found = []
    for block in array.split(BLOCK):
        largest = block.abs().max()
        if bits == 1:
            scale = block.abs().mean().float().to(block.dtype)
            found.append(torch.where(block >= 0, scale, -scale))
        elif bits == 2:
            scale = (largest / 2).float().to(block.dtype)
            far = (block >= scale) | (block < -scale)
            found.append(torch.where(block >= 0, scale, -scale) * torch.where(far, 1.5, 0.5).to(block))
        else:
            scale = (largest / (2 ** (bits - 1) - 1)).float().to(block.dtype)
            found.append(torch.where(scale > 0, (block / scale).round() * scale, 0.0))
    return torch.cat(found)
