"""Quantizers for activations and weights, dequantizers, scale layouts, and SiLU * up fused with quantization."""
