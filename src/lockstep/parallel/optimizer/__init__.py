"""Optimizers that need whole matrices, where ranks hold regions of them."""
