"""Compile cases of the padded forms and of permute."""

import importlib

import torch

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


COMPILE_CASES = [
    ("block-256-experts", _pad(4, 8, 256, 128, False)),
    ("masked-2048-experts", _pad(4, 8, 2048, 64, True)),
    ("one-expert", _pad(4, 1, 1, 4, False)),
    ("permute-bytes", _move(7168, torch.uint8)),
    ("permute-bf16-masked", _move(2880, torch.bfloat16, masked=True)),
    ("permute-scale-columns", _move(56, torch.float32, columns=True)),
]
