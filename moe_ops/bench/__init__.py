"""Measuring: the harness that every file under benchmarks/ uses, the shapes of real models, and the machine's measured limits."""
