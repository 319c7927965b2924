"""A pass over compiled graphs: weights' gradients with fewer trips through the GPU's memory.

**Products in fp32.** Under autocast a linear layer's weight is cast from fp32 to bf16 on the way in, so its gradient is
a product in bf16 and a cast to fp32: 2 bytes written, 2 read and 4 written for each weight of the model. The tensor
cores add up in fp32 anyway, and can write that: 4 bytes, and nothing is rounded in between.

**Embeddings on top.** A language model's head shares its weight with the embedding, so that weight's gradient is a sum:
the head's product, and zeros to which each token's row has been added. The rows can be added to the product itself.
"""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

MATRIX_PRODUCT = torch.ops.aten.mm
CAST = torch.ops.prims.convert_element_type.default
ADD = torch.ops.aten.add.Tensor
ZEROS = torch.ops.aten.full.default
ADD_ROWS = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_masked_index_put_accumulate.default)
"""To what comes first; the former only if its last argument says so."""


class LeanGradients(CustomGraphPass):
    """Both, wherever nobody else sees what is left out."""

    def __call__(self, graph: Graph) -> None:
        for cast in graph.find_nodes(op="call_function", target=CAST):
            _widen(graph, cast)
        for total in graph.find_nodes(op="call_function", target=ADD):
            _add_rows_in_place(graph, total)

    def uuid(self) -> Any:
        """Compiled graphs are kept on disk; those that another version of this pass made are others."""
        return get_hash_for_files((__file__,))


def _widen(graph: Graph, cast: Any) -> None:
    """(a @ b).to(fp32) on a GPU: a product that writes fp32."""
    product, dtype = cast.args
    if dtype != torch.float32 or product.target is not MATRIX_PRODUCT.default or len(product.users) > 1:
        return
    if product.meta["val"].is_cuda and product.meta["val"].dtype in (torch.bfloat16, torch.float16):
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
    values = [node.meta["val"] for node in (product, scattered, total)]
    alike = len({(value.dtype, value.shape) for value in values}) == 1
    if alike and len(rest) == 3 and zeros.target is ZEROS and zeros.args[1] == 0:
        with graph.inserting_before(total):
            joined = graph.call_function(scattered.target, (product, *rest))
        joined.meta.update(total.meta)
        total.replace_all_uses_with(joined)
        graph.erase_node(total)
        graph.erase_node(scattered)


def _is_product(node: Any) -> bool:
    """In fp32: written so, or cast."""
    is_cast = node.target is CAST and node.args[0].target is MATRIX_PRODUCT.default
    return is_cast or node.target is MATRIX_PRODUCT.dtype
