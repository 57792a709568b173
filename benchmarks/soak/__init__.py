"""A long run of a very small model whose workers are killed now and then: `python -m benchmarks.soak`."""
