"""Activation quantizers: latency of few rows, bandwidth of many, both formats; rows of a capacity of which few are filled."""

import torch

from moe_ops import make_qtensor, quantize
from moe_ops.bench import filled
from moe_ops.bench.goal import Goal
from moe_ops.bench.harness import Bench
from moe_ops.quant.quantize import quantize_ref

FORMATS = (("fp8_block", 128, 4, "fp32"), ("mxfp8", 32, 1, "rceil"))
FEW, MANY = Goal("p50_us", 3.0), Goal("of_limit", 0.9)
#: (rows, columns, dtype, scale layout, goal)
GPU = [
    *((rows, k, torch.bfloat16, "row_major", goal) for rows, k, goal in ((1, 7168, FEW), (64, 7168, FEW), (64, 2880, None), (4096, 4096, None))),
    *((rows, k, torch.bfloat16, "row_major", MANY) for rows, k in ((8192, 7168), (32768, 4096))),
    *((rows, 7168, torch.bfloat16, "mn_major", None) for rows in (64, 8192)),
    (8192, 7168, torch.float32, "row_major", None),
]
CPU = [(4, 256, torch.bfloat16, "row_major", None), (40, 160, torch.float32, "mn_major", None)]

bench = Bench("quantize")


def equal(out, bits, scale):
    same = torch.equal(out[0].view(torch.uint8), bits.view(torch.uint8)) and torch.equal(out[1], scale)
    return None if same else "bytes differ from the reference"


for rows, k, dtype, layout, goal in bench.sizes(gpu=GPU, cpu=CPU):
    for fmt, group, scale_bytes, rule in FORMATS:

        def data(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            return torch.randn(rows, k, device=bench.device, generator=g).to(dtype)

        def make(copy: int):
            x = data(copy)
            return lambda: quantize(x, fmt, layout=layout)

        def check(out):
            wanted = make_qtensor(*quantize_ref(data(0), None, fmt, "row_major", rule), fmt, weight=False)
            return equal((out.data, out.scale), wanted.data, wanted.scale)

        bench.case(
            f"M={rows} K={k} {str(dtype).removeprefix('torch.')} {fmt} {layout}",
            {"triton": make},
            check=check,
            nbytes=rows * k * (dtype.itemsize + 1 + scale_bytes / group),
            goal=goal,
            format=fmt,
        )

for form in filled.FORMS:
    for rows, small, large, k in bench.sizes(gpu=[(64, 64, 32768, 7168)], cpu=[(32, 32, 64, 128)]):
        for fmt, group, scale_bytes, rule in FORMATS:

            def at(capacity: int):
                def make(copy: int):
                    x, counts = filled.buffer(form, capacity, rows, k, torch.bfloat16, bench.device, copy)

                    def call():
                        q = quantize(x, fmt, counts=counts)
                        return filled.rows_of(q.data, form, rows), filled.rows_of(q.scale, form, rows)

                    return call

                return make

            def check(out):
                x, _ = filled.buffer(form, small, rows, k, torch.bfloat16, bench.device, 0)
                return equal(out, *quantize_ref(x, None, fmt, "row_major", rule))

            bench.case(
                f"{form} filled={rows} K={k} bfloat16 {fmt}",
                {f"capacity {small}": at(small), f"capacity {large}": at(large)},
                check=check,
                nbytes=rows * k * (3 + scale_bytes / group),
                copies=8,
                goal=Goal("ratio", 1.3, f"capacity {large}", to=f"capacity {small}"),
                format=fmt,
            )
bench.exit()
