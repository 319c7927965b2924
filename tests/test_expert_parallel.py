"""Experts over ranks against one process: in a user's loop, and as an axis."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.cli import main
from lockstep.comm.collectives import all_reduce
from lockstep.comm.ledger import Ledger, recording
from lockstep.config import GPT
from lockstep.layout.world import World
from lockstep.results.metrics import read_metrics
from tests.ranks import on_ranks, refused
from tests.test_checkpoint import check_moves
from tests.test_experts import EXPERTS, OPTIONS, D, build, tokens

PARTED = {"balance": "loss", "shared": 1}


# ---- in a user's loop ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two mixtures, and something before them; always the same."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D, dtype=torch.float64)
        self.mixtures = nn.ModuleList(build(**options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for mixture in self.mixtures:
            x = x + mixture(x)
        return x

    def loss(self, x: Tensor, weights: Tensor) -> Tensor:
        """A sum over tokens, and the auxiliary losses."""
        return (self(x) * weights).sum() + sum(m.auxiliary_loss for m in self.mixtures)


def shares(ranks: int, uneven: bool) -> list[int]:
    """Tokens of each rank: equal, or most on the first and none on the last."""
    return [24 // ranks] * ranks if not uneven else [24 - 3 * (ranks - 2), *[3] * (ranks - 2), 0]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def one_process(options: dict[str, Any], averaged: int = 1) -> dict[str, Any]:
    model = Block(**options)
    weights = torch.linspace(-1, 1, 24 * D, dtype=torch.float64).view(24, D)
    loss = model.loss(tokens(), weights)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    found = gradients_of(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loads = [m.load for m in model.mixtures]
    biases = [m.router.bias for m in model.mixtures if m.router.bias is not None]
    aux = [m.auxiliary_loss.detach() for m in model.mixtures]
    return {"loss": loss.detach(), "gradients": found, "norm": norm, "loads": loads, "biases": biases, "aux": aux}


def spread_over_ranks(
    world: World, options: dict[str, Any], uneven: bool, parts: int = 1, wrapped: bool = False
) -> dict[str, Any]:
    model = Block(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(world.rank)  # all begin with the first rank's
    assert lockstep.expert_parallel(model, gradients="mean" if wrapped else "sum") is model
    for mixture in model.mixtures:
        mixture.parts = parts
    first = sum(shares(world.size, uneven)[: world.rank])
    mine = slice(first, first + shares(world.size, uneven)[world.rank])
    weights = torch.linspace(-1, 1, 24 * D, dtype=torch.float64).view(24, D)
    called: Any = lockstep.DataParallel(model) if wrapped else model
    ledger = Ledger()
    with recording(ledger):
        y = called(tokens()[mine])
        times = world.size if wrapped else 1  # the auxiliary losses are made for a mean too
        loss = (y * weights[mine]).sum() * times + sum(m.auxiliary_loss for m in model.mixtures)
        loss.backward()
    held = {"gate", "up", "down"}
    for name, parameter in model.named_parameters() if not wrapped else []:
        if not (".experts." in name and name.rpartition(".")[2] in held):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad)
    norm = lockstep.clip_grad_norm_(called, 1e9)
    found = gradients_of(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {
        "loss": all_reduce(loss.detach().clone()) / times,
        "gradients": found,
        "norm": norm,
        "loads": [m.load for m in model.mixtures],
        "biases": [m.router.bias for m in model.mixtures if m.router.bias is not None],
        "aux": [all_reduce(m.auxiliary_loss.detach().clone()) / times for m in model.mixtures],
        "sent": ledger.traffic("ep").wire_bytes,
        "calls": [entry.operation for entry in ledger.of("activations", "count")],
        "experts": len(model.mixtures[0].experts.gate),
    }


def compare(found: dict[str, Any], expected: dict[str, Any], rank: int, ranks: int) -> None:
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=1e-11)
    torch.testing.assert_close(found["norm"], expected["norm"], rtol=1e-12, atol=0)
    for name, whole in expected["gradients"].items():
        mine = whole
        if ".experts." in name:
            held = EXPERTS // ranks
            mine = whole[rank * held : (rank + 1) * held]
        torch.testing.assert_close(found["gradients"][name], mine, rtol=0, atol=1e-10, msg=name)
    for what in ("loads", "biases", "aux"):
        for one, other in zip(found[what], expected[what], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def in_all_ways(world: World, ways: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [spread_over_ranks(world, *way) for way in ways]


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_over_ranks_are_those_of_one_process(ranks: int) -> None:
    """Also with all tokens on the first rank, and none on the last."""
    ways = [(options, uneven) for options in OPTIONS for uneven in (False, True)]
    for rank, every in enumerate(on_ranks(in_all_ways, ranks, ways)):
        for (options, _), found in zip(ways, every, strict=True):
            compare(found, one_process(options), rank, ranks)
            assert found["experts"] == EXPERTS // ranks


def test_rows_in_two_parts_and_averaged_gradients() -> None:
    ways = [(PARTED, True, *way) for way in ((2, False), (1, True), (2, True))]
    for rank, every in enumerate(on_ranks(in_all_ways, 2, ways)):
        for (_, _, parts, _), found in zip(ways, every, strict=True):
            compare(found, one_process(PARTED), rank, 2)
            assert found["calls"].count("all_to_all") == 2 * 4 * parts


def against_one_process(
    world: World, model: Block, called: nn.Module, options: dict[str, Any], takes_mean: bool = True
) -> None:
    """Each rank's mean over its own tokens; gradients are averaged. Two steps, as a bias moves after the first."""
    alone = Block(**options)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for i in range(2):
        batch, mine = tokens(seed=i), slice(24 * world.rank // world.size, 24 * (world.rank + 1) // world.size)
        for optimizer in steps:
            optimizer.zero_grad()
        loss = called(batch[mine]).square().mean() + sum(m.auxiliary_loss for m in model.mixtures)
        loss.backward()
        expected = alone(batch).square().mean() + sum(m.auxiliary_loss for m in alone.mixtures)
        expected.backward()
        torch.testing.assert_close(all_reduce(loss.detach().clone()) / world.size, expected.detach())
        for (name, ours), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
            theirs = whole.grad
            if theirs is not None and len(ours) < len(whole):
                first = len(ours) * (world.rank % (len(whole) // len(ours)))
                theirs = theirs[first : first + len(ours)]
            torch.testing.assert_close(ours.grad, theirs, rtol=0, atol=1e-10, msg=name)
        for optimizer in steps:
            optimizer.step()
        for one, other in zip(model.mixtures, alone.mixtures, strict=True):
            assert torch.equal(one.load, other.load)
            torch.testing.assert_close(one.router.bias, other.router.bias)


BALANCED: list[dict[str, Any]] = [{"balance": "loss", "z_loss": 1e-2}, {"balance": "bias", "balance_coefficient": 0.05}]


def averaged(world: World) -> None:
    """Experts on every rank, over two ranks and over pairs of ranks; our wrapper and torch's."""
    for options in BALANCED:
        model = Block(**options)
        against_one_process(world, model, lockstep.DataParallel(model), options)
        model = lockstep.expert_parallel(Block(**options), gradients="mean")
        assert isinstance(model, Block)
        parent = nn.Sequential(model)  # not the module that was spread
        against_one_process(world, model, nn.parallel.DistributedDataParallel(parent), options)
        groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        pair, replicas = groups[world.rank // 2], groups[2 + world.rank % 2]
        model = lockstep.expert_parallel(Block(**options), pair, "mean", replicas=replicas)
        assert isinstance(model, Block)
        against_one_process(world, model, lockstep.DataParallel(model), options)
        assert model.mixtures[0].exchange.tables is None, "a loop of its own keeps no tables"
    again = copy.deepcopy(model)
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert getattr(ours, "spread_by", None) == getattr(theirs, "spread_by", None)
    torch.testing.assert_close(
        lockstep.clip_grad_norm_(lockstep.DataParallel(model), 1e9),
        norm_of(again, model),
    )


def norm_of(again: nn.Module, model: nn.Module) -> Tensor:
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        ours.grad = theirs.grad
    return lockstep.clip_grad_norm_(lockstep.DataParallel(again), 1e9)


def misused(world: World) -> list[str]:
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    pair, copies = groups[world.rank // 2], groups[2 + world.rank % 2]
    ours = lockstep.expert_parallel(Block(), gradients="mean")
    pairs = lockstep.expert_parallel(Block(), pair, "mean", replicas=copies)
    stages = nn.Sequential(*(build(balance="loss") for _ in range(4)))
    return refused(
        [
            lambda: lockstep.DataParallel(ours, process_group=pair),
            lambda: lockstep.expert_parallel(lockstep.FullyShardedDataParallel(Block(), device=torch.device("cpu"))),
            lambda: nn.parallel.DistributedDataParallel(pairs),
            lambda: lockstep.expert_parallel(Block(capacity=1.0), pair, replicas=copies),
            lambda: lockstep.Pipeline(stages, "1f1b", 2),
        ]
    )


def test_a_mean_over_ranks_is_that_of_one_process_in_all_wrappers() -> None:
    on_ranks(averaged, 4)


def test_misuse_over_ranks_is_one_line() -> None:
    for said in on_ranks(misused, 4):
        assert ["\n" in line for line in said] == [False] * 5
        for line, words in zip(
            said,
            (
                "are parts of a mean over 4 ranks, and DataParallel averages over 2",
                "FullyShardedDataParallel has spread the experts of module.mixtures.0 already",
                "DDP cannot reduce experts over their replicas; wrap the model in lockstep.DataParallel",
                "the capacity of mixtures.0 does not go with replicas",
                "the experts of 0 have an auxiliary loss of the whole batch",
            ),
            strict=True,
        ):
            assert words in line


# ---- as an axis -----------------------------------------------------------------------------------------------------

SMALL = GPT(d_model=8, layers=2, heads=2, context=8, vocabulary=17, experts=4, expert_width=6, balance="bias")
SAID = (
    "--model.name gpt --model.layers 2 --model.d-model 16 --model.heads 2 --model.context 16 --model.experts 4 "
    "--data.name text --data.max-bytes 60000 --train.batch-size 8 --train.evaluate-batches 1 --device cpu"
)
FLAGS = SAID.split()


@pytest.mark.slow
def test_checkpoints_move_between_ep_and_other_layouts(tmp_path: Path) -> None:
    rounds = [
        (1, [], ["single"]),
        (2, [("1", "single", "zero3,ep=2")], ["bucketed,ep=2", "zero1,ep=2"]),
        (
            4,
            [("1", "single", "fsdp,ep=2"), ("2", "bucketed,ep=2", "zero3,ep=4"), ("2", "zero1,ep=2", "ddp,tp=2,ep=2")],
            ["zero3,tp=2,ep=2:cut", "fsdp,ep=4"],
        ),
        (2, [("4", "zero3,tp=2,ep=2:cut", "zero2,ep=2"), ("4", "fsdp,ep=4", "single,pp=2")], []),
    ]
    check_moves(rounds, tmp_path, 400, SMALL)


def test_what_capacity_drops_is_logged(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    dropping = ["--model.capacity", "0.5", "--parallel.ep", "2", "--nproc", "2", "--run-dir", run]
    assert main(["train", *FLAGS, "--train.steps", "2", *dropping]) == 0
    (logged,) = [r for r in read_metrics(Path(run)) if r["kind"] == "train"]
    assert 0.5 <= logged["dropped_share"] < 1


@pytest.mark.slow
def test_text_from_experts_over_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What two ranks write is what one writes; a run that was trained with ep goes on without."""
    run = str(tmp_path / "run")
    save = ["--checkpoint.every", "4", "--run-dir", run]
    assert main(["train", *FLAGS, "--train.steps", "4", "--parallel.ep", "2", "--nproc", "2", *save]) == 0
    records = [r for r in read_metrics(Path(run)) if r["kind"] in ("train", "experts")]
    assert {name: sum(load) for name, load in records[-1]["load"].items()} == dict.fromkeys(
        ("blocks.0.mlp", "blocks.1.mlp"), 4 * 8 * 16 * 2
    ), "steps x samples x tokens x active"
    assert records[-2]["busiest_expert"] >= 1 >= records[-2]["auxiliary_loss"] > 0 == records[-2]["dropped_share"]
    assert main(["report", run, "--out", str(tmp_path / "report.html")]) == 0
    assert "Load of experts, up to step 4" in (tmp_path / "report.html").read_text()
    capfd.readouterr()
    texts = []
    for nproc in ("1", "2"):
        assert main(["generate", run, "--prompt", "def ", "im", "--tokens", "12", "--nproc", nproc]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["train", *FLAGS, "--train.steps", "6", "--resume", run, "--nproc", "1"]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--parallel.ep 3 --nproc 2", "parallel.ep 3"),
        ("--parallel.ep 3 --nproc 3", "4 experts cannot be spread over 3 ranks equally"),
        ("--parallel.ep 2 --nproc 3", "parallel.ep 2 does not divide the 3 ranks of replicate x shard x cp"),
        ("--parallel.ep 0 --nproc 2", "parallel.ep is 0"),
        ("--model.active 5", "model.active is 5"),
        ("--model.capacity 0", "model.capacity is 0"),
        ("--model.capacity 1.2 --train.accumulation 2", "model.capacity takes each expert's first tokens"),
        ("--model.dense-layers 2", "model.dense_layers 2 leaves no block"),
        ("--parallel.data local_sgd --nproc 2", "the model has experts, and parallel.data local_sgd"),
        ("--model.experts 0 --parallel.ep 2 --nproc 2", "parallel.ep is about experts, and GPT has none"),
        ("--parallel.cut-experts --parallel.ep 2 --nproc 2", "parallel.cut_experts cuts experts over the ranks of"),
        ("--parallel.tp 2 --model.expert-width 7 --nproc 2", "parallel.tp 2 does not divide the width of an expert, 7"),
        ("--parallel.tp 4 --parallel.ep 2 --model.heads 4 --nproc 4", "is no multiple of parallel.tp 4"),
        ("--model.experts 0 --parallel.expert-halves --nproc 2", "parallel.expert_halves is about experts"),
        ("--parallel.pp 2 --parallel.native pp --parallel.data single --nproc 2", "PyTorch's pipeline pads"),
    ],
)
def test_mistakes_are_one_line_before_ranks_start(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *FLAGS, "--train.steps", "1", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
