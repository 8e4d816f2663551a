"""What the benchmarks share: options, loads, measures, reports, stacks to measure."""
