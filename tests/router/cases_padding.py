"""Compile cases of the padded forms and of permute. Capacities and blocks share one compiled kernel: by default the capacity is T."""

import importlib

import torch

from moe_ops.core import launch
from moe_ops.router import padding
from moe_ops.router.layout import empty_layout

permute = importlib.import_module("moe_ops.router.permute")


def _pad(tokens, top_k, experts, spacing, masked):
    def call():
        _, weights, counts, offsets, order, inverse = empty_layout(tokens, top_k, experts, torch.device("cpu"))
        padding._routing_pad_triton(order, counts, offsets, inverse, weights, spacing, masked)

    return call


def _move(width, dtype, *, masked=False, columns=False):
    def call():
        _, _, _, offsets, order, inverse = empty_layout(4, 8, 16, torch.device("cpu"))
        permute._permute_triton(torch.zeros(4, width, dtype=dtype), order, inverse if masked else None, offsets[-1:], 64, 8, columns)

    return call


def _one_variant(masked):
    def call():
        before = len(launch._compiled)
        for tokens in (1, 8, 9, 10, 16):
            _pad(tokens, 8, 32, tokens, masked)()
        kernels = {id(kernel) for _, _, kernel in launch._compiled[before:]}
        assert len(kernels) == 1, f"{len(kernels)} kernels for 5 capacities or blocks"

    return call


COMPILE_CASES = [
    ("one-variant-for-all-capacities", _one_variant(True)),
    ("one-variant-for-all-blocks", _one_variant(False)),
    ("block-256-experts", _pad(4, 8, 256, 128, False)),
    ("masked-2048-experts", _pad(4, 8, 2048, 64, True)),
    ("one-expert", _pad(4, 1, 1, 4, False)),
    ("permute-bytes", _move(7168, torch.uint8)),
    ("permute-bf16-masked", _move(2880, torch.bfloat16, masked=True)),
    ("permute-scale-columns", _move(56, torch.float32, columns=True)),
]
