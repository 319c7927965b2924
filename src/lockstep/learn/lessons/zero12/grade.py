"""Against torch's Adam on one process: weights, calls, bytes, and what is kept."""

import copy

import torch
from torch import Tensor, nn

from lockstep.learn.rank import Rank, difference

LR, PARAMETERS, NUMBER, RANKS = 0.01, 1000, 8, 3


def facts() -> list[str]:
    """Numbers of the text."""
    return [
        f"moments of {PARAMETERS:,} parameters of {NUMBER} bytes, sharded over {RANKS} ranks",
        "communication of stage 2",
        "(ZeRO stage 1)",
        "(stage 2)",
    ]


def grade(rank: Rank) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5, bias=False))  # 77: no 2 or 3 ranks divide it
    model = model.double().to(rank.device)
    whole, mine = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.Adam(whole.parameters(), lr=LR)
    sharded = rank.exercise.ShardedAdam(list(mine.parameters()), LR)
    kept = state_bytes(sharded)
    total = sum(p.numel() for p in model.parameters())
    piece = -(-total // rank.size)
    rank.expect(
        kept < 2 * total * NUMBER,
        f"each rank keeps the whole optimizer's state: {kept:,} bytes, where its piece has {2 * piece * NUMBER:,}",
    )
    nobody = total - rank.size * getattr(sharded, "piece", piece)
    rank.expect(nobody <= 0, f"the last {nobody} of {total} parameters belong to no rank: round the piece up")
    for step in range(3):
        shares = rank.of_all(4, 5, seed=step)
        before = copy.deepcopy(mine)
        whole.zero_grad()
        (whole(torch.cat(shares)) ** 2).mean().backward()
        optimizer.step()
        mine.zero_grad()
        (mine(shares[rank.rank]) ** 2).mean().backward()
        with rank.recorder.during() as calls:
            sharded.step()
        wrongs = {
            "the other ranks' pieces were never gathered: only this rank's own has moved": own_only(
                before, whole, rank.rank, rank.size
            )
        }
        reduces = any(call.operation == "all_reduce" for call in calls)
        rank.expect(
            not reduces, "an all-reduce brings every rank gradients of parameters that others update: reduce-scatter"
        )
        moment, expected = getattr(sharded, "first", None), _moment(optimizer, whole, rank.rank, rank.size)
        fits = isinstance(moment, Tensor) and moment.shape == expected.shape
        loud = fits and difference("", moment, expected * rank.size) is None
        rank.expect(not loud, "you summed, the mean is missing: the first moment shows it, Adam's step hides the scale")
        rank.expect_model(f"after step {step}: the weight", mine, whole, wrongs)
        rank.expect_calls(calls, {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 1})
        law = 2 * (rank.size - 1) / rank.size * rank.size * piece * NUMBER
        sent = sum(call.sent for call in calls)
        rank.expect(sent <= law, f"a step sends {sent:,.0f} bytes; reduce-scatter and all-gather are {law:,.0f}")
    kept, most = held_bytes([vars(sharded), vars(rank.exercise)], set(mine.parameters())), 3 * piece * NUMBER
    rank.expect(
        kept <= most,
        f"a rank keeps {kept:,} bytes besides the parameters, where its piece and two moments of it have {most:,}",
    )
    if rank.size == RANKS:
        line = [nn.Parameter(torch.zeros(PARAMETERS, dtype=torch.float64, device=rank.device))]
        rank.guess("PREDICTED_STATE", state_bytes(rank.exercise.ShardedAdam(line, LR)))


def state_bytes(optimizer: object) -> int:
    """Of its two moments."""
    moments = [getattr(optimizer, name, None) for name in ("first", "second")]
    return sum(moment.untyped_storage().nbytes() for moment in moments if isinstance(moment, Tensor))


def held_bytes(values: object, but: set[nn.Parameter]) -> int:
    """Of all tensors that can be reached from there, each memory once."""
    found: dict[int, int] = {}
    todo = [values]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor) and value not in but:
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple | set):
            todo += list(value)
        elif isinstance(value, dict):
            todo += list(value.values())
    return sum(found.values())


def own_only(before: nn.Module, after: nn.Module, rank: int, size: int) -> nn.Module:
    """Where only one rank's piece has moved."""
    mixed = copy.deepcopy(before)
    flat = torch.cat([p.detach().flatten() for p in before.parameters()])
    moved = torch.cat([p.detach().flatten() for p in after.parameters()])
    piece = -(-len(flat) // size)
    flat[rank * piece : (rank + 1) * piece] = moved[rank * piece : (rank + 1) * piece]
    for parameter, part in zip(mixed.parameters(), flat.split([p.numel() for p in mixed.parameters()]), strict=True):
        parameter.data.copy_(part.view_as(parameter))
    return mixed


def _moment(optimizer: torch.optim.Adam, model: nn.Module, rank: int, size: int) -> Tensor:
    flat = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()])
    piece = -(-len(flat) // size)
    flat = nn.functional.pad(flat, (0, size * piece - len(flat)))
    return flat[rank * piece : (rank + 1) * piece]
