"""Conversions of scales from row-major to each layout, as a loader does them."""

import torch

from moe_ops import quantize
from moe_ops.bench.harness import Bench
from moe_ops.core.formats import LAYOUTS
from moe_ops.quant.scale_layout import convert_scale_ref, to_layout

bench = Bench("scale_layout")
for rows, k in bench.sizes(gpu=[(64, 7168), (131072, 4096)], cpu=[(5, 160)]):
    for layout in LAYOUTS[1:]:

        def data(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            return quantize(torch.randn(rows, k, device=bench.device, generator=g), "mxfp8")

        def make(copy: int):
            q = data(copy)
            return lambda: to_layout(q, layout).scale

        bench.case(
            f"{rows}x{k // 32} {layout}",
            {"triton": make},
            reference=lambda: convert_scale_ref(data(0).scale, "row_major", layout, rows, k // 32, "mxfp8"),
            nbytes=2 * rows * k / 32,
            copies=4,
        )
bench.exit()
