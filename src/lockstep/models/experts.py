"""A mixture of experts: a router gives each token to a few of many small MLPs, the experts.

What a forward pass does, with T tokens, E experts, k of them active for each token:

1. route      scores = softmax or sigmoid of tokens x router, in fp32 or wider; each token takes the k experts with the
              highest scores, and weights them by these scores
2. sort       the T k choices by expert, with one stable sort (`sorted_choices.py`): each expert's rows lie together
3. compute    each expert's SwiGLU on its rows: grouped products (`grouped.py`), no padding, nothing dropped
4. combine    each token takes its k results back, weighted and summed

Nothing makes the router use experts equally, and an expert that is not used does not learn. Two ways to balance them:

    loss   an auxiliary loss, coefficient * E * sum_e f_e P_e, is least where all are used alike. f_e: the share of all
           choices that went to e. P_e: the mean over tokens of the scores, made to sum to one. Gradients flow through P
    bias   a bias per expert is added to the scores for the choice alone, not for the weights, and moves after each step
           of the optimizer: up where an expert had less than its share, down where it had more

This is a module of one process. `lockstep.expert_parallel` spreads its experts over ranks: it sets `exchange`, which
takes rows to the ranks of their experts and back, and `tally`, which adds up counts over ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.layout.region import copied_with_regions
from lockstep.models.autocast import autocast_dtype, no_autocast
from lockstep.models.balance import Tally, accumulate_load
from lockstep.models.grouped import Counts, grouped_linear, joined_pair
from lockstep.models.kernels import usable_on
from lockstep.models.recompute import backward_is_running
from lockstep.models.sorted_choices import combined, sorted_by_expert, spread, within_capacity
from lockstep.uncompiled import uncompiled

Scoring = Literal["softmax", "sigmoid"]
Balance = Literal["none", "loss", "bias"]


Exchange = Callable[["Experts", list[Tensor], list[Tensor], Callable[[], None]], list[Tensor]]
"""(experts, rows of each part sorted by expert, how many are of each expert, what to do meanwhile) -> what the experts
make of the rows."""


NO_CHOICE = torch.zeros((), dtype=torch.int64)


class Router(nn.Module):
    """Tokens -> a number for each expert."""

    def __init__(self, d_model: int, experts: int, biased: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, d_model))
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(experts) if biased else None)
        self.initial_std = d_model**-0.5
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.initial_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _apply(self, *args: Any, **kwargs: Any) -> "Router":
        """A narrow bias would not move: its steps are smaller than its rounding."""
        before = self.bias
        super()._apply(*args, **kwargs)
        if before is not None and self.bias is not None and self.bias.itemsize < torch.float32.itemsize:
            self.bias = before.to(self.bias.device)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        plain = type(tokens) is Tensor and type(self.weight) in (Tensor, nn.Parameter)
        with no_autocast(tokens.device):
            if plain and usable_on(tokens) and (tokens.dtype, self.weight.dtype) == (torch.bfloat16, torch.float32):
                from lockstep.models.kernels.router import exact_linear  # Triton is where GPUs are

                return exact_linear(tokens, self.weight)
            return F.linear(tokens.to(wide), self.weight.to(wide))


class Experts(nn.Module):
    """The MLPs of all experts, or of those that a rank holds."""

    def __init__(self, count: int, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(count, d_ff, d_model))
        self.up = nn.Parameter(torch.empty(count, d_ff, d_model))
        self.down = nn.Parameter(torch.empty(count, d_model, d_ff))
        self.initial_std = {"gate": d_model**-0.5, "up": d_model**-0.5, "down": d_ff**-0.5}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, std in self.initial_std.items():
            nn.init.normal_(self.get_parameter(name), std=std)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Experts":
        """Parameters keep their regions."""
        return copied_with_regions(self, memo)

    def forward(self, rows: Tensor, counts: Counts) -> Tensor:
        """Rows lie expert by expert."""
        both = joined_pair(rows, self.gate, self.up, counts) if usable_on(rows) else None
        if both is not None:
            from lockstep.models.kernels import experts as kernels  # Triton is where GPUs are

            hidden = kernels.swiglu(both)
        else:
            hidden = F.silu(grouped_linear(rows, self.gate, counts)) * grouped_linear(rows, self.up, counts)
        return grouped_linear(hidden, self.down, counts)


class SharedExperts(nn.Module):
    """Experts that every token passes, as one dense SwiGLU."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


@dataclass
class Routes:
    """Which experts each token takes."""

    chosen: Tensor
    """(tokens, active): numbers of experts."""
    weights: Tensor
    """(tokens, active)"""
    shares: Tensor
    """(tokens, experts): the scores, made to sum to one."""
    logits: Tensor
    """(tokens, experts)"""


class MixtureOfExperts(nn.Module):
    """In the place of a block's MLP: (..., d_model) -> (..., d_model).

        moe = lockstep.MixtureOfExperts(4, 16, experts=8, active=2, balance="loss")
        loss = moe(inputs).square().mean() + moe.auxiliary_loss

    After forward: `load` (how many tokens took each expert), `dropped` (choices that `capacity` has refused), and
    `auxiliary_loss`.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        experts: int,
        active: int,
        *,
        scoring: Scoring = "softmax",
        normalize: bool = True,
        shared: int = 0,
        balance: Balance = "none",
        balance_coefficient: float = 0.01,
        z_loss: float = 0.0,
        capacity: float | None = None,
    ) -> None:
        """`d_ff`: of one expert. `normalize`: the weights of a token's experts sum to one. `shared`: so many experts
        more, as one dense MLP that every token passes.

        `balance_coefficient`: of the auxiliary loss, or how far a bias moves in a step. `z_loss`: of the mean square of
        the logits' logsumexp, which keeps them small; it is part of the auxiliary loss. `capacity`: an expert takes at
        most this many times its equal share of all choices, and the first tokens come first; None: whatever comes.
        """
        super().__init__()
        check_sizes(d_model, d_ff, experts, active, shared)
        check_choices(scoring, balance, balance_coefficient, z_loss, capacity)
        self.d_model, self.active = d_model, active
        self.scoring, self.normalize, self.balance = scoring, normalize, balance
        self.balance_coefficient, self.z_loss, self.capacity = balance_coefficient, z_loss, capacity
        self.router = Router(d_model, experts, biased=balance == "bias")
        self.experts = Experts(experts, d_model, d_ff)
        self.shared = SharedExperts(d_model, shared * d_ff) if shared else None
        self.tally = Tally()
        self.exchange: Exchange = on_this_rank
        self.parts = 1
        """In so many parts of the tokens: one can travel while another is computed."""
        self.enter: Callable[[Tensor], Tensor] = as_it_is
        self.leave: Callable[[Tensor], Tensor] = as_it_is
        """Around the experts, where each is cut over ranks."""
        self.attach: Callable[[Tensor, Tensor], Tensor] = without_loss
        """(output, auxiliary loss) -> output, where the loss's gradient is added in backward, and not by the caller."""
        self.counted = True
        """False: what passes are no samples, and no balance counts them."""
        self.load = torch.zeros(experts, dtype=torch.int64)
        self.dropped = NO_CHOICE
        self.auxiliary_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shared: list[Tensor] = []
        y = self.routed(x, lambda: shared.append(self.shared(x)) if self.shared is not None else None)
        return y + shared[0] if shared else y

    @uncompiled
    def routed(self, x: Tensor, meanwhile: Callable[[], None]) -> Tensor:
        """`meanwhile`: called when the rows have left for their experts."""
        tokens = x.reshape(-1, x.shape[-1])
        routes = self.route(tokens)
        every = [sorted_by_expert(chosen, routes.shares.shape[1]) for chosen in routes.chosen.tensor_split(self.parts)]
        counts = every[0].counts if self.parts == 1 else torch.stack([choices.counts for choices in every]).sum(0)
        counted = counts if self.counted else torch.zeros_like(counts)
        tallied = self.tally.begin(counted, self.needs_load, needs_earlier=self.capacity is not None)
        if self.training or not self.counted:  # a filler passes in evaluation mode; its rank has a load all the same
            accumulate_load(self, counted)
        if self.capacity is not None:
            (choices,) = every
            every = [within_capacity(choices, routes.chosen, tallied.earlier, self.limit(tallied.load))]
        dtype = autocast_dtype(x.device)
        pieces = self.enter(tokens if dtype is None else tokens.to(dtype)).tensor_split(self.parts)
        rows = [spread(part, c, self.active) for part, c in zip(pieces, every, strict=True)]
        rows = self.exchange(self.experts, rows, [choices.counts for choices in every], meanwhile)
        shares = self.enter(routes.weights).tensor_split(self.parts)
        parts = [combined(part, share, c) for part, share, c in zip(rows, shares, every, strict=True)]
        y = self.leave(parts[0] if len(parts) == 1 else torch.cat(parts)).view(x.shape)
        self.load = tallied.load
        if self.capacity is not None:
            self.dropped = (counts.sum() - every[0].counts.sum()) * self.counted
        if self.training and not backward_is_running():
            self.tally.passed(counted, self.dropped)
        self.auxiliary_loss = self.loss_of_balance(routes)
        return self.attach(y, self.auxiliary_loss)

    def __getstate__(self) -> dict[str, Any]:
        """To copy or pickle it: without the graph of the last auxiliary loss."""
        return {**self.__dict__, "auxiliary_loss": self.auxiliary_loss.detach()}

    @property
    def needs_load(self) -> bool:
        """The auxiliary loss depends on how many tokens there are, and where they go, on all ranks."""
        return self.balance == "loss" or self.z_loss > 0

    def route(self, tokens: Tensor) -> Routes:
        logits = self.router(tokens)
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        by = scores if self.router.bias is None else scores + self.router.bias.to(scores)
        chosen = by.detach().topk(self.active).indices
        weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        shares = scores if self.scoring == "softmax" else scores / scores.sum(-1, keepdim=True)
        return Routes(chosen, weights, shares, logits)

    def limit(self, load: Tensor) -> Tensor:
        """How many choices an expert takes."""
        assert self.capacity is not None
        return (self.capacity * load.sum() / len(load)).ceil()

    def loss_of_balance(self, routes: Routes) -> Tensor:
        """This rank's part of the auxiliary loss: the parts of all ranks add up to that of one process, or their mean
        is that.
        """
        loss = torch.zeros((), dtype=routes.shares.dtype, device=routes.shares.device)
        if not self.counted or not self.needs_load:
            return loss
        times = self.tally.averaged_over
        load = (self.load if self.tally.load_of_step is None else self.tally.load_of_step).to(loss)
        tokens = (load.sum() / self.active).clamp(min=1)
        if self.balance == "loss":
            share_of_choices = load / load.sum().clamp(min=1)
            mean_share = routes.shares.sum(0) / tokens
            loss = self.balance_coefficient * len(load) * (share_of_choices * mean_share).sum()
        if self.z_loss:
            loss = loss + self.z_loss * routes.logits.logsumexp(-1).square().sum() / tokens
        return loss if times == 1 else loss * times


def mixtures_in(module: nn.Module) -> dict[str, MixtureOfExperts]:
    """By name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, MixtureOfExperts)}


def on_this_rank(
    experts: Experts, rows: list[Tensor], counts: list[Tensor], meanwhile: Callable[[], None]
) -> list[Tensor]:
    meanwhile()
    return [experts(part, Counts(count)) for part, count in zip(rows, counts, strict=True)]


def as_it_is(x: Tensor) -> Tensor:
    return x


def without_loss(y: Tensor, auxiliary_loss: Tensor) -> Tensor:
    return y


# ---- mistakes --------------------------------------------------------------------------------------------------------


def check_sizes(d_model: int, d_ff: int, experts: int, active: int, shared: int) -> None:
    for name, size, least in (
        ("d_model", d_model, 1),
        ("d_ff", d_ff, 1),
        ("experts", experts, 1),
        ("active", active, 1),
        ("shared", shared, 0),
    ):
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise UserError(f"{name} is {size!r}, but it must be a whole number, {least} or more")
    if active > experts:
        raise UserError(f"active is {active}, but a token cannot take more experts than there are, {experts}")


def check_choices(scoring: str, balance: str, coefficient: float, z_loss: float, capacity: float | None) -> None:
    for name, word, words in (("scoring", scoring, get_args(Scoring)), ("balance", balance, get_args(Balance))):
        if word not in words:
            raise UserError(f"{name} is {word!r}, but it must be one of {', '.join(words)}")
    for name, number in (("balance_coefficient", coefficient), ("z_loss", z_loss)):
        if not is_number(number) or not 0 <= number < inf:
            raise UserError(f"{name} is {number!r}, but it must be a number, 0 or more")
    if capacity is not None and not (is_number(capacity) and 0 < capacity < inf):
        raise UserError(
            f"capacity is {capacity!r}, but it must be a number above 0 (1.25: a quarter more than an equal share), or "
            f"None, which drops nothing"
        )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
