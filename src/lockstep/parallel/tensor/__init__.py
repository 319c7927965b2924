"""Tensor and sequence parallelism: ranks hold parts of the same matrices, and of the positions between them."""
