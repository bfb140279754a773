"""Models, data and operations that benchmarks measure, by plain arguments."""
