"""A new strategy is one file and one row of the table: then it is proven like the others, with every axis."""

import importlib.util
from pathlib import Path
from typing import Any

from lockstep.config import Parallel
from lockstep.layout.world import World
from lockstep.parallel.law import Sent
from lockstep.strategies import STRATEGIES, Engine
from lockstep.strategies.model_sizes import ModelSizes
from lockstep.strategies.table import expected_traffic, strategy_named
from lockstep.verify import Request, Verdict, verify
from tests.ranks import on_ranks

FILE = '''
"""Data parallelism in a few lines."""

from torch import nn

from lockstep.comm.collectives import all_reduce
from lockstep.config import Parallel
from lockstep.parallel import law
from lockstep.strategies.engine import Engine
from lockstep.strategies.facts import Facts
from lockstep.strategies.model_sizes import ModelSizes


class OneByOne(Engine):
    """After backward, one all-reduce for each parameter."""

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        return Facts("one all-reduce for each parameter", overlaps=False, smaller="zero1", one_by_one=True)

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> law.Sent:
        return law.all_reduce(sizes.psi * sizes.itemsize, ranks).in_pieces(len(sizes.sizes))

    def wrap(self, stage: nn.Module) -> None:
        self.model = self.module = stage
        self.optimizer = self.options.make_optimizer(self.trainable())

    def finish_gradients(self) -> None:
        group = self.layout.gradient
        for parameter in self.trainable():
            if parameter.grad is not None:
                all_reduce(parameter.grad, group=group, purpose="gradients")
                parameter.grad /= group.size
'''


def table_with(folder: Path, text: str) -> dict[str, type[Engine]]:
    """The table, and a row for the class that a file has."""
    (folder / "one_by_one.py").write_text(text)
    spec = importlib.util.spec_from_file_location("one_by_one", folder / "one_by_one.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {**STRATEGIES, "one_by_one": module.OneByOne}


def proven(world: World, folder: str, text: str) -> list[Verdict]:
    place = Path(folder) / str(world.rank)
    place.mkdir()
    return verify(world, Request(["one_by_one", "one_by_one,tp=2"][: world.size - 1], steps=2), table_with(place, text))


def test_it_is_proven_with_its_traffic_and_beside_another_axis(tmp_path: Path) -> None:
    verdicts = on_ranks(proven, 4, str(tmp_path), FILE)[0]
    assert {v.strategy: v.failures for v in verdicts} == {"one_by_one": [], "one_by_one,tp=2": []}
    assert verdicts[0].expected is not None
    assert verdicts[0].counted is not None
    assert verdicts[0].expected.matches(verdicts[0].counted)


def test_a_fault_in_it_is_found(tmp_path: Path) -> None:
    verdicts = on_ranks(proven, 2, str(tmp_path), FILE.replace("/= group.size", "/= group.size + 1"))[0]
    assert "gradient" in verdicts[0].failures[0] or "norm" in verdicts[0].failures[0]


def test_what_is_true_of_it_is_known(tmp_path: Path) -> None:
    table = table_with(tmp_path, FILE)
    parallel = strategy_named("one_by_one,tp=2", Parallel(), table)
    assert parallel.tp == 2
    facts = table["one_by_one"].facts(parallel)
    assert (facts.zero_stage, facts.smaller) == (0, "zero1")
    sizes = ModelSizes([(4, 2), (2,)], [], [(4, 2), (2,)], itemsize=4, gathered=4, reduced=4)
    assert expected_traffic(sizes, parallel, 2, table) == Sent(2, 40.0)
