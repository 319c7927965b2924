"""Data parallelism: every rank holds the model, and gradients are averaged."""
