"""Expert parallelism: each rank holds some of the experts, and tokens travel to them."""
