"""A pass over compiled graphs: weights' gradients with fewer trips through the GPU's memory.

**Products in fp32.** Under autocast a linear layer's weight is cast from fp32 to bf16 on the way in, so its gradient is
a product in bf16 and a cast to fp32: 2 bytes written, 2 read and 4 written for each weight of the model. The tensor
cores add up in fp32 anyway, and can write that: 4 bytes, and nothing is rounded in between.

**Embeddings on top.** A language model's head shares its weight with the embedding, so that weight's gradient is a sum:
the head's product, and zeros to which each token's row has been added. The rows can be added to the product itself.

**Sums on the way.** The gradients of q, k and v are put side by side and then read again to add up their columns, for
the bias of the layer that made them. One kernel of our own does both (`models/kernels/join.py`).
"""

from operator import getitem
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from lockstep.models.kernels import HAS_TRITON

MATRIX_PRODUCT = torch.ops.aten.mm
CAST = torch.ops.prims.convert_element_type.default
ADD = torch.ops.aten.add.Tensor
ZEROS = torch.ops.aten.full.default
ADD_ROWS = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_masked_index_put_accumulate.default)
"""To what comes first; the former only if its last argument says so."""
JOIN = torch.ops.aten.cat.default
RESHAPE = (torch.ops.aten.reshape.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
COPY = torch.ops.aten.clone.default
SUM = torch.ops.aten.sum.dim_IntList
HALVES = (torch.bfloat16, torch.float16)


class LeanGradients(CustomGraphPass):
    """All of it, wherever nobody else sees what is left out."""

    def __init__(self) -> None:
        self.join_columns: Any = None
        if HAS_TRITON:  # now, as a graph that was compiled in another process may call it
            from lockstep.models.kernels import join  # noqa: F401

            self.join_columns = torch.ops.lockstep.join_columns.default

    def __call__(self, graph: Graph) -> None:
        for cast in graph.find_nodes(op="call_function", target=CAST):
            _widen(graph, cast)
        for total in graph.find_nodes(op="call_function", target=ADD):
            _add_rows_in_place(graph, total)
        if self.join_columns is not None:
            for joined in graph.find_nodes(op="call_function", target=JOIN):
                _sum_while_joining(graph, joined, self.join_columns)

    def uuid(self) -> Any:
        """Compiled graphs are kept on disk; those that another version of this pass made are others."""
        return get_hash_for_files((__file__,))


def _widen(graph: Graph, cast: Any) -> None:
    """(a @ b).to(fp32) on a GPU: a product that writes fp32."""
    product, dtype = cast.args
    if dtype != torch.float32 or product.target is not MATRIX_PRODUCT.default or len(product.users) > 1:
        return
    if product.meta["val"].is_cuda and product.meta["val"].dtype in HALVES:
        product.target, product.args = MATRIX_PRODUCT.dtype, (*product.args, torch.float32)
        product.meta["val"] = cast.meta["val"]
        cast.replace_all_uses_with(product)
        graph.erase_node(cast)


def _add_rows_in_place(graph: Graph, total: Any) -> None:
    """product + zeros.add_rows(...): product.add_rows(...)."""
    parts: list[Any] = [part for part in total.args if isinstance(part, Node) and len(part.users) == 1]
    product = next((part for part in parts if _is_product(part)), None)
    scattered = next((part for part in parts if part.target in ADD_ROWS and part.args[-1] is not False), None)
    if product is None or scattered is None or total.kwargs:
        return
    zeros, *rest = scattered.args
    alike = _are_alike(product, scattered, total)
    if alike and len(rest) == 3 and zeros.target is ZEROS and zeros.args[1] == 0:
        with graph.inserting_before(total):
            added = graph.call_function(scattered.target, (product, *rest))
        added.meta.update(total.meta)
        total.replace_all_uses_with(added)
        graph.erase_node(total)
        graph.erase_node(scattered)


def _is_product(node: Any) -> bool:
    """In fp32: written so, or cast."""
    is_cast = node.target is CAST and node.args[0].target is MATRIX_PRODUCT.default
    return is_cast or node.target is MATRIX_PRODUCT.dtype


def _sum_while_joining(graph: Graph, joined: Any, join_columns: Any) -> None:
    """cat(q, k, v).reshape(rows, -1) and its sum over the rows, on a GPU: both from one kernel."""
    parts, *dim = joined.args
    value = joined.meta["val"]
    flat: Any = next(iter(joined.users))
    wanted = value.is_cuda and value.dtype in HALVES and len(parts) == 3 and dim == [value.ndim - 1]
    if not wanted or len(joined.users) > 1 or flat.target not in RESHAPE:
        return
    total = next((user for user in flat.users if user.target is SUM and user.args[1:] == ([0], True)), None)
    if total is None or total.kwargs or not _are_alike(*parts) or not all(_lies_in_rows(part) for part in parts):
        return
    if flat.meta["val"].shape != (value.numel() // value.shape[-1], value.shape[-1]):
        return
    with graph.inserting_before(joined):
        both = graph.call_function(join_columns, tuple(parts))
        rows, sums = (graph.call_function(getitem, (both, index)) for index in (0, 1))
    both.meta["val"] = (flat.meta["val"], total.meta["val"])
    for new, old in ((sums, total), (rows, flat)):
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    graph.erase_node(joined)


def _are_alike(*nodes: Any) -> bool:
    """In dtype and shape, if the shape is known by now: where the batch's size changes, it has symbols."""
    values = [node.meta["val"] for node in nodes]
    known = all(isinstance(size, int) for value in values for size in value.shape)
    return known and len({(value.dtype, value.shape) for value in values}) == 1


def _lies_in_rows(part: Any) -> bool:
    """Its elements are in memory as they are in a row, and are not copied to be."""
    source = part.args[0] if part.target in RESHAPE else part
    return source.target is not COPY and bool(source.meta["val"].is_contiguous())
