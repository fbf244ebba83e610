"""What tests and benchmarks hold the closed form of memory against: a step traced on fake tensors."""
