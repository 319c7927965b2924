"""The loop, its optimizer, its metrics and its checkpoints.

Nothing is imported here: checkpoints and TensorBoard take a second to load, and most commands need neither.
"""
