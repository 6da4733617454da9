"""SiLU * up with quantization: few rows, many rows, and few filled rows of a large capacity, packed and masked."""

import math

import torch

from moe_ops import silu_mul_quantize
from moe_ops.bench import filled
from moe_ops.bench.goal import Goal
from moe_ops.bench.harness import Bench
from moe_ops.quant.silu_mul_quantize import silu_mul_quantize_ref

FORMATS = (("fp8_block", 128, 4, "fp32"), ("mxfp8", 32, 1, "rceil"))
MANY = Goal("of_limit", 0.9)
#: (rows' sizes, rows of each expert or None, I, dtype, goal); all rows are filled
GPU = [
    *(((rows,), None, inner, torch.float32, None) for rows, inner in ((8, 1536), (64, 2048), (8192, 2048), (32768, 768))),
    ((64,), None, 2048, torch.bfloat16, None),
    *(((32768,), [1024] * 32, 2048, dtype, MANY) for dtype in (torch.float32, torch.bfloat16)),
    ((256, 128), [128] * 256, 2048, torch.float32, None),
]
CPU = [((5,), None, 160, torch.float32, None), ((3, 4), [4, 4, 4], 128, torch.bfloat16, None)]

bench = Bench("silu_mul_quantize")


def compare(out, bits, scale):
    """Behind an exponential, two right kernels may differ: by 2 ulp in a scale, by a step in few elements."""
    moved = float((out[0].view(torch.uint8) != bits).float().mean())
    off = float((out[1].float() / scale.float() - 1).nan_to_num().abs().max())
    return None if moved <= 2e-4 and off <= 4e-7 else f"{moved:.2g} of the elements and scales by up to {off:.2g} differ from the reference"


def reference(x, fmt, rule):
    return silu_mul_quantize_ref(x, None, fmt, "row_major", rule, "silu", 1.0, math.inf, 0.0, False)


for lead, per_expert, inner, dtype, goal in bench.sizes(gpu=GPU, cpu=CPU):
    rows = math.prod(lead)
    counts = torch.tensor(per_expert, dtype=torch.int32, device=bench.device) if per_expert else None
    for fmt, group, scale_bytes, rule in FORMATS:

        def data(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            return torch.randn(*lead, 2 * inner, device=bench.device, generator=g).to(dtype)

        def make(copy: int):
            x = data(copy)
            return lambda: silu_mul_quantize(x, fmt, counts=counts)

        bench.case(
            f"{'x'.join(map(str, lead))} {'counted ' if per_expert else ''}I={inner} {str(dtype).removeprefix('torch.')} {fmt}",
            {"triton": make},
            check=lambda out: compare((out.data, out.scale), *reference(data(0), fmt, rule)),
            nbytes=rows * inner * (2 * dtype.itemsize + 1 + scale_bytes / group),
            goal=goal,
            format=fmt,
        )

for form in filled.FORMS:
    for rows, small, large, inner in bench.sizes(gpu=[(64, 64, 32768, 2048)], cpu=[(32, 32, 64, 128)]):
        for fmt, group, scale_bytes, rule in FORMATS:

            def at(capacity: int):
                def make(copy: int):
                    x, counts = filled.buffer(form, capacity, rows, 2 * inner, torch.float32, bench.device, copy)

                    def call():
                        q = silu_mul_quantize(x, fmt, counts=counts)
                        return filled.rows_of(q.data, form, rows), filled.rows_of(q.scale, form, rows)

                    return call

                return make

            def check(out):
                x, _ = filled.buffer(form, small, rows, 2 * inner, torch.float32, bench.device, 0)
                return compare(out, *reference(x, fmt, rule))

            bench.case(
                f"{form} filled={rows} I={inner} float32 {fmt}",
                {f"capacity {small}": at(small), f"capacity {large}": at(large)},
                check=check,
                nbytes=rows * inner * (9 + scale_bytes / group),
                copies=8,
                goal=Goal("ratio", 1.3, f"capacity {large}", to=f"capacity {small}"),
                format=fmt,
            )
bench.exit()
