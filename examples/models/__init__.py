"""Small models with random weights, made on the spot for examples, tests and benchmarks."""
