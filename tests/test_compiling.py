"""What torch.compile makes of a model: the same losses, and gradients with fewer passes over memory."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep.config import GPT, Config, Data, Train
from lockstep.strategies.lean_gradients import ADD, CAST, JOIN, MATRIX_PRODUCT, LeanGradients
from lockstep.training.loop import train
from lockstep.world import World


def test_compile_trains_alike() -> None:
    settings = Train(batch_size=8, steps=3, log_every=1, optimizer="adamw", lr=1e-3)
    graphs = {}
    for layers, ways in ((2, ("blocks", "model")), (1, ("blocks",))):
        config = Config(GPT(d_model=16, layers=layers, heads=2, context=16), Data("text", max_bytes=20_000), settings)
        plain = train(World(), config, quiet=True).losses
        for way in ways:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compiled = train(World(), replace(config, train=replace(settings, compile=way)), quiet=True).losses
            assert compiled == pytest.approx(plain, rel=1e-4)
            graphs[layers, way] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs[2, "model"] > 0
    assert graphs[2, "blocks"] == graphs[1, "blocks"] > 0  # one for all


def test_gradients_leave_their_products_in_fp32() -> None:
    """On a GPU, and only where nobody else looks at the bf16; seen in the graph, with tensors that are not there."""

    def two_products(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cast_only, seen = MATRIX_PRODUCT(a, b), MATRIX_PRODUCT(b, a)
        return CAST(cast_only, torch.float32), CAST(seen, torch.float32), seen

    for device, expected in (("cuda", 1), ("cpu", 0)):
        with FakeTensorMode():
            a, b = (torch.empty(shape, device=device, dtype=torch.bfloat16) for shape in ((4, 6), (6, 4)))
            graph = make_fx(two_products)(a, b).graph
            before = [value.meta["val"].dtype for value in graph.output_node().args[0]]
            LeanGradients()(graph)
        graph.lint()
        assert len(graph.find_nodes(op="call_function", target=MATRIX_PRODUCT.dtype)) == expected
        assert len(graph.find_nodes(op="call_function", target=CAST)) == 2 - expected
        assert [value.meta["val"].dtype for value in graph.output_node().args[0]] == before


@pytest.mark.parametrize("how", ["added", "added, masked", "put", "to ones", "to a broadcast product"])
def test_rows_of_an_embedding_are_added_to_the_product(how: str) -> None:
    """In the gradient of a weight that head and embedding share; seen in the graph, and the same numbers."""

    def gradient(a: Tensor, b: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        start = torch.full((5, 4), 1.0 if how == "to ones" else 0.0)
        if how == "added, masked":
            masked = torch.ops.aten._unsafe_masked_index_put_accumulate
            scattered = masked(start, (tokens < 3)[:, None], [tokens], rows)
        else:
            scattered = torch.ops.aten.index_put(start, [tokens], rows, how != "put")
        total: Tensor = CAST(a @ b, torch.float32) + scattered
        return total

    a = torch.randn(1 if how == "to a broadcast product" else 5, 6).bfloat16()
    given = a, torch.randn(6, 4).bfloat16(), torch.tensor([3, 1, 3]), torch.randn(1, 4).expand(3, 4)
    module = make_fx(gradient, tracing_mode="fake")(*given)
    LeanGradients()(module.graph)
    module.graph.lint()
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=ADD)) == (not how.startswith("added"))
    torch.testing.assert_close(module(*given), gradient(*given))


@pytest.mark.parametrize("how", ["rows", "on a CPU", "not in rows", "seen", "in fp32", "other sums"])
def test_columns_are_summed_while_they_are_joined(how: str) -> None:
    """On a GPU, for parts that lie in rows; seen in the graph, with tensors that are not there, and by a stand-in."""

    def gradient(*parts: Tensor) -> list[Tensor]:
        joined = torch.cat([part.transpose(1, 2).reshape(2, 3, 20) for part in parts], 2)
        flat = joined.view(6, 60)
        found = [flat.clone(), flat.sum([1 if how == "other sums" else 0], keepdim=True)]
        return [*found, joined] if how == "seen" else found

    dtype = torch.float32 if how == "in fp32" else torch.bfloat16
    given = heads(dtype)
    if how == "not in rows":
        given[1] = given[1].contiguous()
    with FakeTensorMode():
        device = "cpu" if how == "on a CPU" else "cuda"
        fakes = [torch.empty_strided(g.shape, g.stride(), dtype=dtype, device=device) for g in given]
        module = make_fx(gradient)(*fakes)
        joining()(module.graph)
    module.graph.lint()
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=JOIN)) == (how != "rows")
    assert len(module.graph.find_nodes(op="call_function", target=joined_by_hand)) == (how == "rows")
    torch.testing.assert_close(module(*given), gradient(*given))


def test_a_batch_whose_size_changes_is_left_alone() -> None:
    """Shapes then have symbols, which cannot be compared as numbers can."""

    def gradient(*parts: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.cat([part.transpose(1, 2).reshape(-1, 3, 20) for part in parts], 2).view(-1, 60)
        return flat.clone(), flat.sum([0], keepdim=True)

    module = make_fx(gradient, tracing_mode="symbolic")(*heads(torch.bfloat16))
    (join,) = module.graph.find_nodes(op="call_function", target=JOIN)
    assert isinstance(join.meta["val"].shape[0], torch.SymInt)
    with patch("torch.Tensor.is_cuda", True):
        joining()(module.graph)
    assert len(module.graph.find_nodes(op="call_function", target=JOIN)) == 1


def heads(dtype: torch.dtype) -> list[Tensor]:
    """Three arrays as attention gives them, (batch, heads, tokens, size), that lie in memory token by token."""
    return [torch.randn(2, 3, 4, 5).to(dtype).transpose(1, 2) for _ in range(3)]


def joining() -> LeanGradients:
    found = LeanGradients()
    found.join_columns = joined_by_hand
    return found


def joined_by_hand(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for the kernel."""
    rows = torch.cat(parts, -1).flatten(0, 1)
    return rows, rows.sum(0, keepdim=True)
