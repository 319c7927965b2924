"""A pass over compiled graphs: a weight's gradient leaves its matrix product in fp32.

Under autocast a linear layer's weight is cast from fp32 to bf16 on the way in, so its gradient is a product in bf16 and
a cast to fp32: 2 bytes written, 2 read and 4 written for each weight of the model. The tensor cores add up in fp32
anyway, and can write that: 4 bytes, and nothing is rounded in between.
"""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

MATRIX_PRODUCT = torch.ops.aten.mm
CAST = torch.ops.prims.convert_element_type.default


class WideGradients(CustomGraphPass):
    """(a @ b).to(fp32), on a GPU and where nobody else sees the narrow product, becomes a product that writes fp32."""

    def __call__(self, graph: Graph) -> None:
        for cast in graph.find_nodes(op="call_function", target=CAST):
            product, dtype = cast.args
            if dtype != torch.float32 or product.target is not MATRIX_PRODUCT.default or len(product.users) > 1:
                continue
            if product.meta["val"].is_cuda and product.meta["val"].dtype in (torch.bfloat16, torch.float16):
                product.target, product.args = MATRIX_PRODUCT.dtype, (*product.args, torch.float32)
                product.meta["val"] = cast.meta["val"]
                cast.replace_all_uses_with(product)
                graph.erase_node(cast)

    def uuid(self) -> Any:
        """Compiled graphs are kept on disk; those that another version of this pass made are others."""
        return get_hash_for_files((__file__,))
