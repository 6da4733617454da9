"""Activation quantizers: latency of few rows, bandwidth of many, both formats; rows of a capacity of which few are filled."""

import torch

from moe_ops import make_qtensor, quantize
from moe_ops.bench.harness import Bench
from moe_ops.quant.quantize import quantize_ref

#: (capacity, filled rows, columns, dtype, scale layout)
GPU = [
    *((rows, rows, k, torch.bfloat16, "row_major") for rows, k in ((1, 7168), (64, 7168), (64, 2880), (4096, 4096), (8192, 7168), (32768, 4096))),
    *((rows, rows, 7168, torch.bfloat16, "mn_major") for rows in (64, 8192)),
    (8192, 8192, 7168, torch.float32, "row_major"),
    (32768, 64, 7168, torch.bfloat16, "row_major"),
]
CPU = [(4, 4, 256, torch.bfloat16, "row_major"), (40, 3, 160, torch.float32, "mn_major")]

bench = Bench("quantize")
for capacity, rows, k, dtype, layout in bench.sizes(gpu=GPU, cpu=CPU):
    for fmt, group, scale_bytes, rule in (("fp8_block", 128, 4, "fp32"), ("mxfp8", 32, 1, "rceil")):
        counts = None if rows == capacity else torch.tensor([rows], dtype=torch.int32, device=bench.device)

        def data(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            return torch.randn(capacity, k, device=bench.device, generator=g).to(dtype)

        def make(copy: int):
            x = data(copy)
            return lambda: quantize(x, fmt, counts=counts, layout=layout)

        def check(out):
            bits, scale = quantize_ref(data(0)[:rows], None, fmt, "row_major", rule)
            wanted = make_qtensor(bits, scale, fmt, weight=False)
            if torch.equal(out.data[:rows].view(torch.uint8), wanted.data.view(torch.uint8)) and torch.equal(out.scale[:rows], wanted.scale):
                return None
            return "bytes differ from the reference"

        bench.case(
            f"M={capacity} filled={rows} K={k} {str(dtype).removeprefix('torch.')} {fmt} {layout}",
            {"triton": make},
            check=check,
            nbytes=rows * k * (dtype.itemsize + 1 + scale_bytes / group),
            format=fmt,
        )
bench.exit()
