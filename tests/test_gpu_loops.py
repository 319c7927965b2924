"""A user's own loop on a GPU: what `tests/test_own_loops.py` shows of CPU ranks, over NCCL."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.layout.world import World
from tests import test_own_loops as loops
from tests.gpu import NEEDS_GPU, on_gpu

pytestmark = NEEDS_GPU


def on_its_gpu(world: World, function: Callable[..., Any], *args: Any) -> Any:
    torch.set_default_device(world.device)
    found = function(world, *args)
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.cpu(), found)


def close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10, msg=f"{what} {key}")


def test_a_users_loop_is_that_of_one_process() -> None:
    expected = loops.one_process()
    for rank in on_gpu(on_its_gpu, 2, loops.every_loop, loops.ON_TWO, 1):
        for kind, found in rank.items():
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9), kind
            for name in ("weights", "average"):
                close(found[name], expected[name], f"{kind} {name}")


def test_freezing_and_copies() -> None:
    model = loops.build()
    loops.freezing_loop(model, loops.adamw(model.parameters()), (0, 1))
    for rank in on_gpu(on_its_gpu, 2, loops.freezing):
        for kind, found in rank.items():
            close(found, model.state_dict(), kind)
    model = loops.build()
    expected = loops.averaged(model, loops.adamw(model.parameters()), (0, 1)).state_dict()
    for rank in on_gpu(on_its_gpu, 2, loops.averaged_copies):
        for kind, found in rank.items():
            close(found, expected, kind)


@pytest.mark.parametrize("sync", ["naive", "bucketed"])
def test_a_rank_that_goes_on_after_an_error_is_noticed_by_the_others(sync: str) -> None:
    first, second = on_gpu(on_its_gpu, 2, loops.caught_errors, sync)
    assert "the backward of another rank has failed" in first
    assert second == "went on"
