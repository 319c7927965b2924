"""Local SGD and DiLoCo: train apart, average every K steps.

Every rank takes K optimizer steps on its own data without any communication, then:

- Local SGD (no outer optimizer): the parameters become their mean over the ranks.
- DiLoCo (Douillard and others, 2023): the last common parameters minus the mean serve as a gradient, and an outer
  optimizer (SGD with Nesterov momentum) takes one step with it from the last common parameters.

The traffic is 1/K of data parallelism's. With K = 1, plain averaging and an optimizer that is linear in the gradient
(SGD, with or without momentum), it is data parallelism. What may be added:

- fragments: parts of the model are averaged at different steps, K / fragments apart, so that no step sends much; and
  `delay`: ranks train on for some steps while a fragment travels, and mix the result with what they have learned since
  (Streaming DiLoCo, 2025)
- `bits`, `density`: what was learned travels in few bits, or only the largest numbers; what was not sent is added to
  what is learned next (SparseLoCo, 2025)
- `gossip`: ranks average in pairs (NoLoCo, 2025). With an outer optimizer the two average where they began, too
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_reduce
from lockstep.errors import UserError
from lockstep.layout.group import Group, GroupLike, group_of
from lockstep.parallel.data.bucket import assign_buckets
from lockstep.parallel.data.exchange import Exchange
from lockstep.parallel.data.law import fragments_of
from lockstep.parallel.data.wrapper import broadcast_module, check_same_model
from lockstep.parallel.holding import Holder

CHUNK_BYTES = 25 * 1024 * 1024
MIX = 0.5
"""After a delay, the weight of what a rank has learned meanwhile."""


@dataclass
class Chunk:
    """Parameters that travel as one array."""

    parameters: list[Tensor]
    starts: list[Tensor]
    """Where ranks began together; none: the parameters themselves are averaged."""
    kept: Tensor | None = None
    """What was not sent yet."""
    mean: Tensor | None = None
    """Has arrived, and is not used yet."""
    finish: Any = field(default=None, repr=False)
    """Set while it travels."""

    def begin(self, exchange: Exchange, group: Group, number: int) -> None:
        if self.starts:
            parts = [start - p.data for start, p in zip(self.starts, self.parameters, strict=True)]
            parts += self.starts if exchange.gossip else []
        else:
            parts = [p.data for p in self.parameters]
        flat = torch.cat([part.reshape(-1) for part in parts])
        if self.kept is not None:
            flat += self.kept * group.size
        self.finish = exchange.begin(flat, group, number)

    def arrive(self) -> Tensor:
        """Wait for the mean."""
        if self.finish is not None:
            self.mean, kept = self.finish()
            self.kept = None if kept is None else kept.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            self.finish = None
        assert self.mean is not None
        return self.mean

    def loaded(self, saved: Tensor | None) -> Tensor | None:
        """What was saved of this chunk, which must be the same one."""
        if saved is None:
            return None
        elements = sum(p.numel() for p in self.parameters)
        if len(saved) % max(1, elements):
            raise UserError(
                f"the state of local SGD has {len(saved):,} numbers for a part of the model that has {elements:,}: it "
                f"was saved with other fragments; give the same number, or resume with another number of ranks"
            )
        return saved.to(self.parameters[0].device)

    @torch.no_grad()
    def take(self) -> None:
        """Use the mean: as parameters, or as a gradient at the starting points."""
        mean, self.mean = self.arrive(), None
        targets = self.starts or self.parameters
        sizes = [target.numel() for target in targets]
        changes, *starts = mean.split(sum(sizes))
        for target, part in zip(targets, changes.split(sizes), strict=True):
            if self.starts:
                target.grad = part.view_as(target)
            else:
                target.copy_(part.view_as(target))
        for target, part in zip(targets, starts[0].split(sizes) if starts else (), strict=False):
            target.copy_(part.view_as(target))


class LocalSGD(Holder):
    """Call `after_step()` after each optimizer step; every `every` steps it averages the model.

        averaging = lockstep.LocalSGD(model, every=8)
        model(inputs).sum().backward()  # nothing is sent
        optimizer.step()
        averaging.after_step()

    `outer_lr` above 0: DiLoCo, an outer step of SGD with Nesterov momentum on the averaged change. `fragments`,
    `delay`: Streaming DiLoCo. `bits`, `density`: what is sent of the change. `gossip`: ranks average in pairs.
    """

    def __init__(
        self,
        module: nn.Module,
        every: int = 8,
        outer_lr: float = 0.0,
        outer_momentum: float = 0.9,
        process_group: GroupLike = None,
        *,
        fragments: int = 1,
        delay: int = 0,
        bits: int = 32,
        density: float = 1.0,
        gossip: bool = False,
    ) -> None:
        self.exchange = Exchange(bits, density, gossip)
        check_settings(every, fragments, delay, self.exchange, outer_lr > 0)
        self.module, self.every, self.group = module, every, group_of(process_group, "replicate")
        self.steps, self.delay = 0, delay
        check_same_model(module, self.group)
        broadcast_module(module, self.group)
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.outer_parameters: list[Tensor] = []
        self.outer: torch.optim.Optimizer | None = None
        if outer_lr > 0:
            self.outer_parameters = [p.detach().clone() for p in self.trainable]
            self.outer = torch.optim.SGD(self.outer_parameters, outer_lr, outer_momentum, nesterov=outer_momentum > 0)
        start_of = dict(zip(self.trainable, self.outer_parameters, strict=False))
        self.fragments: list[list[Chunk]] = []
        for numbers in fragments_of([p.numel() for p in self.trainable], fragments):
            chunks = assign_buckets([self.trainable[i] for i in numbers], CHUNK_BYTES)
            self.fragments.append([Chunk(list(c), [start_of[p] for p in c if p in start_of]) for c in chunks])

    @property
    def is_one_model(self) -> bool:
        """Ranks have the same parameters now."""
        in_step = len(self.fragments) <= 1 and not self.delay and not self.exchange.gossip
        return in_step and self.steps % self.every == 0

    def after_step(self) -> bool:
        """Count one step; True if parameters were averaged."""
        self.steps += 1
        averaged = False
        for index, fragment in enumerate(self.fragments):
            phase = (self.steps - index * self.every // len(self.fragments)) % self.every
            if phase == 0:
                self._begin(fragment)
            if phase == self.delay and is_under_way(fragment):
                self._take(fragment, MIX if self.delay else 0.0)
                averaged = True
        if self.steps % self.every == 0:
            self._average_buffers()
        return averaged

    def average(self) -> None:
        """Average the model behind the last step, when ranks may still differ: to the mean, without an outer step."""
        for fragment in self.fragments:
            if is_under_way(fragment):
                self._take(fragment, MIX)
        self._average([p.data for p in self.trainable])
        for start, parameter in zip(self.outer_parameters, self.trainable, strict=False):
            start.copy_(parameter.detach())
        self._average_buffers()

    def _begin(self, fragment: list[Chunk]) -> None:
        for chunk in fragment:
            chunk.begin(self.exchange, self.group, self.steps)

    @torch.no_grad()
    def _take(self, fragment: list[Chunk], mix: float) -> None:
        """`mix`: the weight of what a rank has learned since it sent."""
        for chunk in fragment:
            chunk.take()
        if self.outer is None:
            return
        self.outer.step()  # only of this fragment: no other start has a gradient
        self.outer.zero_grad()
        for chunk in fragment:
            for start, parameter in zip(chunk.starts, chunk.parameters, strict=True):
                parameter.copy_(start.lerp(parameter, mix) if mix else start)

    def _average_buffers(self) -> None:
        self._average([b for b in self.module.buffers() if b.is_floating_point()])

    @torch.no_grad()
    def _average(self, tensors: list[Tensor]) -> None:
        """Mean over all ranks, in as many all-reduces as there are 25 MiB chunks and dtypes."""
        if self.group.size == 1:
            return
        for chunk in assign_buckets(tensors, CHUNK_BYTES):
            flat = torch.cat([t.reshape(-1) for t in chunk]).div_(self.group.size)
            all_reduce(flat, group=self.group, purpose="parameters")
            for tensor, part in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
                tensor.copy_(part.view_as(tensor))

    # ---- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of this rank. It waits for what travels."""
        state: dict[str, Any] = {"steps": self.steps, "meeting_point": self.outer_parameters}
        chunks = [chunk for fragment in self.fragments for chunk in fragment]
        means = {str(i): chunk.arrive() for i, chunk in enumerate(chunks) if is_under_way([chunk])}
        kept = {str(i): chunk.kept for i, chunk in enumerate(chunks) if chunk.kept is not None}
        state |= {"arrived": means} if means else {}
        state |= {"kept": kept} if kept else {}
        return state if self.outer is None else {**state, "outer": self.outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        with torch.no_grad():
            for mine, theirs in zip(self.outer_parameters, state["meeting_point"], strict=True):
                mine.copy_(theirs)
        for index, chunk in enumerate(chunk for fragment in self.fragments for chunk in fragment):
            chunk.finish = None
            chunk.mean, chunk.kept = (chunk.loaded(state.get(key, {}).get(str(index))) for key in ("arrived", "kept"))
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])

    @torch.no_grad()
    def restart(self) -> None:
        """The model has been replaced by one that is the same on all ranks: continue from there."""
        self.steps = 0
        for chunk in (chunk for fragment in self.fragments for chunk in fragment):
            chunk.finish = chunk.mean = chunk.kept = None
        for mine, parameter in zip(self.outer_parameters, self.trainable if self.outer_parameters else [], strict=True):
            mine.copy_(parameter)


def is_under_way(fragment: list[Chunk]) -> bool:
    return any(chunk.finish is not None or chunk.mean is not None for chunk in fragment)


def check_settings(every: int, fragments: int, delay: int, exchange: Exchange, has_outer: bool) -> None:
    if every < 1:
        raise UserError(f"every is {every}, but parameters are averaged every 1 or more steps")
    if fragments < 1:
        raise UserError(f"fragments is {fragments}, but a model has 1 or more")
    if not 0 <= delay < every:
        raise UserError(f"delay is {delay}, but a fragment must arrive before it is sent again: 0 to {every - 1}")
    if delay and exchange.gossip:
        raise UserError(f"ranks that average in pairs wait for each other: leave delay {delay} out, or gossip")
    if (delay or exchange.keeps) and not has_outer:
        what = "delay" if delay else "bits and density"
        raise UserError(f"{what} are about the changes that an outer optimizer takes; give outer_lr (usually 0.7) too")
