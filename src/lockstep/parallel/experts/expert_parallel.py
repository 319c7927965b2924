"""Expert parallelism by hand: rank r of n holds experts r E/n to (r+1) E/n, and each rank has tokens of its own.

How the communication goes, for each mixture of experts, in a forward pass:

1. each rank routes its tokens and sorts the choices by expert: the rows for one rank lie together
2. an all-gather of counts (E numbers of each rank): now every rank knows how many rows it will receive, from whom, and
   for which of its experts. The host reads them: once a layer, it waits for the device here
3. an all-to-all takes the rows to the ranks of their experts (`dispatch`); shared experts compute meanwhile
4. each rank sorts what it has received by expert, and computes
5. the opposite all-to-all brings the results back (`combine`)

Backward sends the gradients of the results to the experts, and those of the rows back: two all-to-alls more. A rank
without tokens, and an expert that no token takes, take part in all of it with nothing.

Which gradients are sums. The ranks' losses, and their auxiliary losses, add up to those of one process; so do the
gradients of what every rank holds (router, shared experts), which the caller reduces as those of the rest of the model.
Gradients of experts need no reduction: an expert has seen the tokens of all ranks. Where an engine averages over the
ranks instead (DDP, and all wrappers of ours), each rank's loss is n times its part of the sum, and then experts have n
times their gradient: `gradients="mean"` divides by n. To forget it is a fault that Adam hides, and loss curves too.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_async
from lockstep.errors import UserError
from lockstep.layout.group import ALONE, Group, GroupLike, group_of
from lockstep.layout.region import Box, Region, held_as
from lockstep.models.experts import Experts, MixtureOfExperts, mixtures_in, on_this_rank
from lockstep.models.recompute import backward_is_running
from lockstep.parallel.data.wrapper import broadcast_module, check_same_model
from lockstep.parallel.experts.law import Table
from lockstep.parallel.experts.over_tensor import share_tokens
from lockstep.parallel.experts.tally import RanksTally
from lockstep.parallel.experts.token_exchange import TokenExchange
from lockstep.parallel.guards import EXPERT_PARALLEL, mark_spread, spread_by


def expert_parallel(
    module: nn.Module,
    process_group: GroupLike = None,
    gradients: Literal["sum", "mean"] = "sum",
    same_tokens: bool = False,
    replicas: GroupLike = None,
) -> nn.Module:
    """Spread the experts of every mixture in `module`, which every rank holds in full, over the group, in place.

        moe = lockstep.MixtureOfExperts(4, 16, experts=8, active=2, balance="loss")
        lockstep.expert_parallel(moe)
        loss = moe(inputs).square().sum() + moe.auxiliary_loss  # the ranks' losses add up
        loss.backward()  # experts have their gradients; those of the router are to be summed over the ranks

    All ranks start from the first rank's weights. Names stay; `experts.gate`, `up` and `down` have E/n experts.
    `gradients`: "mean" where losses and gradients are averaged over the ranks, as DDP and the wrappers of ours do; the
    auxiliary loss is made for that mean too. `same_tokens`: all ranks have the same tokens, as under tensor
    parallelism: each routes its part of them, and all gradients are those of the whole. `replicas`: the ranks that get
    the same experts as this one, where groups of ranks share the experts each; the wrappers of ours reduce over them.
    FSDP2 is to leave experts alone: `fully_shard(module, ignored_params=...)`.
    """
    group, copies = group_of(process_group, "ep"), ALONE if replicas is None else group_of(replicas, "replicas")
    if not isinstance(module, nn.Module):
        raise UserError(f"expert_parallel takes a module, not a {type(module).__name__}; call it for each of several")
    if gradients not in ("sum", "mean"):
        raise UserError(f"gradients is {gradients!r}, but it must be sum or mean")
    mixtures = mixtures_in(module)
    if not mixtures:
        raise UserError(
            f"{type(module).__name__} has no MixtureOfExperts to spread; make the blocks' MLPs "
            f"lockstep.MixtureOfExperts first"
        )
    for name, mixture in mixtures.items():
        check_experts(mixture, group.size, name)
        check_replicas(mixture, copies, same_tokens, name)
    if all(p.device.type != "meta" for p in module.parameters()):
        for joined in (copies, group):
            check_same_model(module, joined)
            broadcast_module(module, joined)
    takes_mean = gradients == "mean" and not same_tokens
    for mixture in mixtures.values():
        tallied = tuple(joined for joined in (group, copies) if joined.size > 1) or (ALONE,)
        ranks = ExpertRanks(group, tallied, group.size if takes_mean else 1, always_tallies=True)
        ranks.averaged_over = group.size * copies.size if takes_mean else 1
        ranks.sums_gradients = gradients == "sum" and group.size > 1 and not same_tokens
        if same_tokens and group.size > 1:
            share_tokens(mixture, group, sequence=False)
        spread_experts(mixture, ranks, copies)
    return module


def check_replicas(mixture: MixtureOfExperts, copies: Group, same_tokens: bool, name: str) -> None:
    """Refuse what `replicas` does not go with."""
    where = f" of {name}" if name else ""
    for what, chosen in (("same_tokens", same_tokens), (f"the capacity{where}", mixture.capacity is not None)):
        if chosen and copies.size > 1:
            raise UserError(f"{what} does not go with replicas: the order of tokens over both groups is not known")


def check_experts(mixture: MixtureOfExperts, ranks: int, name: str = "") -> None:
    """Refuse a number of ranks that does not divide the experts, and experts that are cut already."""
    where, count = f" of {name}" if name else "", len(mixture.router.weight)
    if (wrapper := spread_by(mixture.parameters())) is not None and not isinstance(mixture.exchange, ExpertRanks):
        raise UserError(
            f"{wrapper} has spread the experts{where} already; call expert_parallel before you wrap the model"
        )
    if isinstance(mixture.exchange, ExpertRanks):
        raise UserError(f"the experts{where} have been spread over {mixture.exchange.group.size} ranks already")
    if count % ranks:
        fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UserError(
            f"{count} experts{where} cannot be spread over {ranks} ranks equally; {fits} ranks can have them"
        )


def can_spread(module: nn.Module, ranks: int) -> bool:
    """It has experts, and the ranks divide them."""
    mixtures = mixtures_in(module).values()
    return bool(mixtures) and all(len(mixture.router.weight) % ranks == 0 for mixture in mixtures)


def spread_experts(
    mixture: MixtureOfExperts, ranks: "ExpertRanks", replicas: Group = ALONE, width: tuple[int, int] | None = None
) -> None:
    """Keep this rank's experts; of each, this part of its width. `replicas`: the ranks that hold the same."""
    experts, group = mixture.experts, ranks.group
    count, d_ff, _ = experts.gate.shape
    first, last = group.rank * count // group.size, (group.rank + 1) * count // group.size
    low, high = (0, d_ff) if width is None else width
    is_cut = (last - first, high - low) != (count, d_ff)
    for name, parameter in list(experts.named_parameters()):
        kept = parameter
        if is_cut:
            offsets, sizes = [first, 0, 0], [last - first, *parameter.shape[1:]]
            inner = 2 if name == "down" else 1  # d_ff is in its columns
            offsets[inner], sizes[inner] = low, high - low
            kept = held_as(parameter, Region(tuple(parameter.shape), (Box(tuple(offsets), tuple(sizes)),)))
            setattr(experts, name, kept)
        if group.size > 1:
            kept.replicas = replicas  # type: ignore[attr-defined]
    if is_cut:
        mark_spread(experts.parameters(), EXPERT_PARALLEL)
    mixture.exchange = mixture.tally = ranks


class ExpertRanks(RanksTally):
    """The ranks that share experts: counts choices over them, and takes rows to their experts and back."""

    def __init__(
        self, group: Group, tallied: tuple[Group, ...], averaged: int = 1, always_tallies: bool = False
    ) -> None:
        """`tallied`: all ranks whose tokens are balanced together: those of `group`, and perhaps more.

        `averaged`: by how much gradients of experts are divided.
        """
        super().__init__(tallied, always_tallies)
        self.group, self.averaged = group, averaged
        self.replicas = ALONE
        """The ranks that hold the same experts, if the caller has said so."""
        self.sums_gradients = False
        """The caller adds up gradients, and an engine that averages them must not."""
        self.tables: list[Table] | None = None
        """How many rows each rank had for each expert in the training passes of a step, where someone keeps that."""

    def __deepcopy__(self, _: object) -> "ExpertRanks":
        """A copy of a mixture communicates with the same ranks, and has counts of its own."""
        other = ExpertRanks(self.group, self.groups, self.averaged, self.always_tallies)
        other.sums_gradients, other.replicas = self.sums_gradients, self.replicas
        other.averaged_over = self.averaged_over
        return other

    def __call__(
        self, experts: Experts, rows: list[Tensor], counts: list[Tensor], meanwhile: Callable[[], None]
    ) -> list[Tensor]:
        if self.group.size == 1:
            return on_this_rank(experts, rows, counts, meanwhile)
        exchanges = self.exchanges(counts)
        dispatches = [exchange.dispatch() for exchange in exchanges]
        combines = [exchange.combine() for exchange in exchanges]
        arriving = [dispatch.issue(part) for dispatch, part in zip(dispatches, rows, strict=True)]
        meanwhile()
        returning = []
        for exchange, dispatch, combine, part in zip(exchanges, dispatches, combines, arriving, strict=True):
            returning.append(combine.issue(exchange.results(experts, dispatch.wait(part))))
        return [combine.wait(part) for combine, part in zip(combines, returning, strict=True)]

    def exchanges(self, counts: list[Tensor]) -> list[TokenExchange]:
        """The one place where the host waits for the device: a rank must know how much it will receive."""
        tables, pending = all_gather_async(torch.stack(counts), self.group, purpose="count")
        pending.wait()
        by_part = tables.transpose(0, 1)  # part, rank, expert
        known = by_part.tolist()
        if self.tables is not None and torch.is_grad_enabled() and not backward_is_running():
            self.tables += known
        names = [""] if len(known) == 1 else [f" {i}" for i in range(len(known))]
        return [
            TokenExchange(table, on_device, self.group, self.averaged, name)
            for table, on_device, name in zip(known, by_part, names, strict=True)
        ]
