"""Axes that cut the model, with the data engines: equal to one process, and checkpoints move between all of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import UserError
from lockstep.cli import main
from lockstep.comm.ledger import Ledger, recording
from lockstep.config import Config, Data, Parallel, Train
from lockstep.data import Batch, read_share
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.parallel import counting
from lockstep.parallel.context import context_parallel as context
from lockstep.parallel.pipeline.tied import TiedGradients
from lockstep.parallel.tensor import parallel_products
from lockstep.strategies import strategy_name, strategy_named
from lockstep.strategies.pipeline import PipelineWorker
from lockstep.training.prepare import load_data, prepare_strategy
from lockstep.verify import Request, Verdict, preset, verify
from lockstep.verify.presets import HYBRIDS
from lockstep.verify.scenarios import CUT_GPT
from tests.ranks import LONG, on_ranks
from tests.test_checkpoint import check_moves

MORE = {ranks: [name for name in names if name not in preset("standard")[ranks]] for ranks, names in HYBRIDS.items()}
"""What `lockstep verify` by itself does not have."""
AT_4_AS_PAIRS = ("fsdp,cp=2,tp=2", "fsdp+HYBRID_SHARD,tp=2", "fsdp+HYBRID_SHARD,tp=2:native", "zero1,pp=2:1f1b,tp=2")
MORE[8] = [name for name in MORE[8] if name not in AT_4_AS_PAIRS]
ON_GLOO = ["single,tp=2:sequence", "bucketed,cp=2", "bucketed,cp=2:ulysses", "single,pp=2:1f1b", "single,pp=2:zb-v"]


def verify_some(world: World, names: list[str], steps: int) -> list[Verdict]:
    return verify(world, Request(names, steps=steps, only_values=True))


def failures(ranks: int, names: list[str], steps: int = 2, timeout: float = LONG) -> dict[str, list[str]]:
    verdicts = on_ranks(verify_some, ranks, names, steps, timeout=timeout)[0]
    return {v.strategy: v.failures for v in verdicts if not v.passed}


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("ranks", MORE)
def test_all_of_them_equal_one_process(ranks: int) -> None:
    assert not failures(ranks, MORE[ranks], 2, timeout=800)


@pytest.mark.slow
@pytest.mark.proof
def test_some_of_them_equal_one_process_on_gloo() -> None:
    launch = Launch(nproc=2, device="cpu", backend="gloo")
    verdicts = run_on_ranks(verify_some, ON_GLOO, 3, launch=launch, start_method="forkserver")[0]
    assert not {v.strategy: v.failures for v in verdicts if not v.passed}


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.proof
def test_checkpoints_move_between_all_axes(tmp_path: Path) -> None:
    two = ["single,tp=2:sequence", "single,tp=2:native", "single,pp=2:interleaved", "zero3,cp=1", "fsdp,tp=2"]
    four = [
        "zero3,tp=2",
        "fsdp,tp=2",
        "fsdp,tp=2:native",
        "ddp,pp=2:zb-v",
        "zero1,pp=2:1f1b,tp=2",
        "zero2,tp=2:sequence",
    ]
    there = [("4", a, two[i % len(two)]) for i, a in enumerate(four)]  # each once, on either side
    back = [("2", two[i % len(two)], b) for i, b in enumerate(four[1:] + four[:1])]
    rounds: list[tuple[int, list[tuple[str, str, str]], list[str]]] = [
        (1, [], ["single"]),
        (4, [("1", "single", four[0])], four),
        (2, there, two),
        (4, back, []),
        (1, [("4", four[-1], "single"), ("2", two[-1], "single")], []),
    ]
    check_moves(rounds, tmp_path, 500)


# ---- faults that must be found -------------------------------------------------------------------------------------


def forgotten_all_reduce(patch: pytest.MonkeyPatch) -> None:
    """A row-parallel layer does not sum its outputs."""
    patch.setattr(parallel_products, "reduce_from_ranks", lambda x, group: x)


def norm_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """What two ranks hold counts twice in the gradient's norm."""
    patch.setattr(counting.np, "isin", lambda mine, _: mine != mine)


def dropped_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """The last micro-batch counts nothing."""

    def cut(self: PipelineWorker, batch: Batch) -> list[Batch]:
        *kept, last = batch.micro_batches(self.micro_batches)
        return [*kept, Batch(last.inputs, last.targets, filler=True)]

    patch.setattr(PipelineWorker, "_micro_batches", cut)


def tied_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Each stage steps a tied embedding by its own gradient."""
    patch.setattr(TiedGradients, "parameters", lambda self: iter(()))


def mask_off_by_a_block(patch: pytest.MonkeyPatch) -> None:
    """Queries see keys that come after them."""

    class Shifted(context.Seen):
        def __init__(self, mine: int, owner: int, causal: bool, length: int) -> None:
            super().__init__(mine, owner, causal, length)
            self.keys = self.queries = slice(0, length)

    patch.setattr(context, "Seen", Shifted)


FAULTS = {
    "forgotten all-reduce": (
        forgotten_all_reduce,
        "single,tp=2",
        "even: step 1, the loss, first in the output of blocks.0 on rank 0 differs",
    ),
    "norm counted twice": (norm_counted_twice, "single,tp=2", "even: step 1, the norm of the gradients"),
    "dropped micro-batch": (dropped_micro_batch, "single,pp=2:1f1b", "even: step 1, the loss differs"),
    "tied not summed": (tied_not_summed, "single,pp=2:1f1b", "gradient of token_embedding.weight"),
    "mask off by a block": (
        mask_off_by_a_block,
        "bucketed,cp=2",
        "even: step 1, the loss, first in the output of blocks.0 on rank 0 differs",
    ),
}


def verify_faults(world: World) -> dict[str, list[str]]:
    found = {}
    for fault, (plant, name, _) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            found[fault] = verify(world, Request([name], steps=2))[0].failures
    return found


def test_planted_faults_are_named() -> None:
    found = on_ranks(verify_faults, 2)[0]
    for fault, (_, _, said) in FAULTS.items():
        assert any(said in failure for failure in found[fault]), (fault, found[fault])


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["zero3,tp=2", "ddp,pp=2:zb-v", "zero1,pp=2:1f1b:native,tp=2:sequence", "fsdp,tp=2:native"]
)
def test_names_and_sections_are_the_same(name: str) -> None:
    assert strategy_name(strategy_named(name)) == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero3,tp", "must be an axis and its degree"),
        ("zero3,xp=2", "must be an axis and its degree"),
        ("zero3,tp=two", "must be an axis and its degree"),
        ("zero3,tp=2:fast", "'fast' after tp"),
        ("zero3,shard=2:native", "'native' after shard"),
        ("ddp,pp=2:2f2b", "'2f2b' after pp"),
        ("nothing,tp=2", "does not exist"),
    ],
)
def test_wrong_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        strategy_named(name, Parallel())


# ---- configs -------------------------------------------------------------------------------------------------------

SMALL = ["--data.name", "synthetic", "--data.samples", "16", "--model.d-model", "32", "--model.context", "32"]


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param("gpt_tp", 2, marks=pytest.mark.slow),
        pytest.param("gpt_pp", 2, marks=pytest.mark.slow),
        pytest.param("gpt_long_context", 2, marks=pytest.mark.slow),
        pytest.param("gpt_3d", 8, marks=pytest.mark.slow),
    ],
)
def test_every_config_trains(config: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nproc", str(ranks), "--oversubscribe", "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    assert main(["train", f"configs/{config}.yaml", *flags, "--train.steps", "2", *SMALL]) == 0
    assert "2 steps in" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints").is_dir()


def loss_from_whole_weights(world: World, name: str) -> float:
    """Of the first step, where every rank is given a whole model (as `bench` does, or with train.weights)."""
    torch.manual_seed(world.rank)  # all begin with the first rank's
    config = Config(CUT_GPT, Data(name="synthetic", samples=8), Train(batch_size=8))
    dataset = load_data(world, config)
    plain = build_model(CUT_GPT, dataset.spec, seed=world.rank)
    strategy = prepare_strategy(world, replace(config, parallel=strategy_named(name)), dataset, plain)
    return strategy.step(read_share(dataset.train, torch.arange(8), strategy.batch_share())).loss


def test_natives_begin_with_the_first_ranks_weights() -> None:
    (alone,) = on_ranks(loss_from_whole_weights, 1, "single")
    assert on_ranks(loss_from_whole_weights, 4, "fsdp,tp=2:native") == pytest.approx([alone] * 4, abs=1e-5)


def broadcast_bytes(world: World, names: list[str]) -> list[tuple[int, int]]:
    """(bytes of parameters that are broadcast before the first step, bytes of the model), of each."""
    config = Config(CUT_GPT, Data(name="synthetic", samples=8), Train(batch_size=8))
    dataset, found = load_data(world, config), []
    for name in names:
        plain = build_model(CUT_GPT, dataset.spec, seed=world.rank)
        with recording(Ledger()) as ledger:
            ledger.open()
            prepare_strategy(world, replace(config, parallel=strategy_named(name)), dataset, plain)
        sent = sum(e.nbytes for e in ledger.of("parameters") if e.operation == "broadcast")
        whole = [*plain.parameters(), *(b for b in plain.buffers() if b.is_floating_point())]
        found.append((sent, sum(tensor.nbytes for tensor in whole)))
    return found


def test_weights_are_broadcast_once() -> None:
    names = ["bucketed,pp=2:1f1b", "zero1,tp=2", "zero3,tp=2", "fsdp,pp=2:1f1b", "zero2", "ddp,pp=2:1f1b"]
    for sent, whole in on_ranks(broadcast_bytes, 4, names)[0]:
        assert sent == whole


def losses_with_an_unused_parameter(world: World, names: list[str]) -> list[list[float]]:
    config = Config(CUT_GPT, Data(name="synthetic", samples=8), Train(batch_size=8))
    dataset, found = load_data(world, config), []
    for name in names:
        plain = build_model(CUT_GPT, dataset.spec, seed=0)
        plain.get_submodule("blocks.0").register_parameter("spare", nn.Parameter(torch.ones(3)))
        strategy = prepare_strategy(world, replace(config, parallel=strategy_named(name)), dataset, plain)
        batch = read_share(dataset.train, torch.arange(8), strategy.batch_share())
        found.append([strategy.step(batch).loss for _ in range(3)])
    return found


def test_a_pass_without_all_gradients() -> None:
    """DDP expects all of them in the pass in which it reduces."""
    names = ["bucketed", "ddp,pp=2:1f1b", "bucketed,pp=2:1f1b", "zero2,pp=2:zb-h1", "zero3,pp=2:1f1b", "fsdp,pp=2:1f1b"]
    plain, *others = on_ranks(losses_with_an_unused_parameter, 4, names)[0]
    for name, losses in zip(names[1:], others, strict=True):
        assert losses == pytest.approx(plain, abs=1e-5), name


def test_a_filler_is_recomputed_as_it_was_computed(tmp_path: Path) -> None:
    """Without dropout, in both: three of four micro-batches of one sample have none."""
    flags = "--model.name gpt --model.layers 2 --model.dropout 0.1 --data.name synthetic --data.samples 4"
    steps = "--train.recompute full --train.batch-size 1 --train.steps 1 --train.evaluate-batches 1"
    command = f"train {flags} {steps} --parallel.pp 2 --nproc 2 --device cpu --run-dir {tmp_path}"
    assert main(command.split()) == 0
