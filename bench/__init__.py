"""Benchmarks: each checks its results, then times them beside the baselines, in one run."""
