"""Context parallelism: ranks hold parts of the same sequences."""
