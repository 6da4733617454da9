"""Sources of the kernels over CUTLASS's headers, which `cutlass_build.py` compiles: no Python here."""
