"""Copies in the memory of several nodes: any one node may be lost, with all that it held."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.on_nodes import CheckpointsOnNodes, nodes_of, partner
from lockstep.layout.world import World
from lockstep.training.prepare import load_data, prepare_strategy
from tests.ranks import on_ranks
from tests.test_checkpoint import config_for, flip, go_on


def test_a_partner_is_on_another_node() -> None:
    for nodes in ([[0, 1], [2, 3]], [[0], [1], [2]], [[0, 1, 2], [3]], [[0, 2], [1, 3], [4, 5]]):
        for node in nodes:
            assert all(partner(rank, nodes) not in node for rank in node)
    assert [partner(rank, [[0, 1], [2, 3]]) for rank in range(4)] == [2, 3, 0, 1]


def lose_nodes(world: World, base: Path, per_node: int) -> dict[str, Any]:
    """Save on nodes that see no folder but their own; then lose one after the other, and load what is left."""
    from lockstep.checkpoint.checkpoints import Checkpoints

    config = config_for("zero3")  # every rank holds a part that nobody else has
    strategy = prepare_strategy(world, config, load_data(world, config))
    group = Checkpoints(world, base / "disk").group
    assert group is not None
    home = base / f"node{world.rank // per_node}"
    nodes = nodes_of(home, world, group)
    memory = CheckpointsOnNodes(world, home, nodes, group, keep_last=1)
    told: dict[str, Any] = {"nodes": nodes}
    go_on(world, config, strategy, 0, 2)
    memory.save(strategy, {"step": 2})
    go_on(world, config, strategy, 2, 2)
    memory.save(strategy, {"step": 4}, wait=True)
    told["problem"], told["steps"] = memory.problem, [f.name for f in memory.all()]
    weights = strategy.full_state_dict()
    for lost in range(len(nodes)):
        torch.distributed.barrier(group)
        if world.rank == nodes[lost][0]:
            shutil.rmtree(home)
        torch.distributed.barrier(group)
        fresh = prepare_strategy(world, config, load_data(world, config))
        found, damage = memory.find()
        assert found == home / "step-00000004", damage
        assert memory.load(found, fresh)["step"] == 4
        loaded = fresh.full_state_dict()
        told[f"lost {lost}"] = all(torch.equal(loaded[name], weights[name]) for name in weights)
        memory.save(fresh, {"step": 4}, wait=True)
    # One file on every node that has it: no memory of that step is whole, and that is said.
    torch.distributed.barrier(group)
    for file in home.glob("step-00000004/__1_*") if memory.publishes else ():
        flip(file)
    torch.distributed.barrier(group)
    told["damaged"] = memory.find()
    return told


@pytest.mark.parametrize(("ranks", "per_node"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_any_one_node_may_be_lost(tmp_path: Path, ranks: int, per_node: int) -> None:
    for told in on_ranks(lose_nodes, ranks, tmp_path, per_node):
        assert told["nodes"] == [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]
        assert told["problem"] is None
        assert told["steps"] == ["step-00000004"]
        assert all(told[f"lost {node}"] for node in range(ranks // per_node))
        found, damage = told["damaged"]
        assert found is None
        assert "step-00000004: no node has __1_" in damage[0]
