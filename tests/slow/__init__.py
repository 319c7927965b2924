"""The slow tier, `make test-slow`: matrices, and what was only ever run by hand."""
