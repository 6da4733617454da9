"""SiLU * up with quantization: few rows, many rows, and few filled rows of a large capacity, packed and masked."""

import math

import torch

from moe_ops import silu_mul_quantize
from moe_ops.bench.harness import Bench
from moe_ops.quant.silu_mul_quantize import silu_mul_quantize_ref

#: (rows' sizes, filled rows of each expert or None, I, dtype)
GPU = [
    *(((rows,), None, inner, torch.float32) for rows, inner in ((8, 1536), (64, 2048), (8192, 2048), (32768, 2048), (32768, 768))),
    *(((rows,), None, 2048, torch.bfloat16) for rows in (64, 32768)),
    ((64,), [2] * 32, 2048, torch.float32),
    ((32768,), [2] * 32, 2048, torch.float32),
    ((32, 1024), [2] * 32, 2048, torch.float32),
    ((256, 128), [128] * 256, 2048, torch.float32),
]
CPU = [((5,), None, 160, torch.float32), ((3, 4), [1, 0, 4], 128, torch.bfloat16)]

bench = Bench("silu_mul_quantize")
for lead, filled, inner, dtype in bench.sizes(gpu=GPU, cpu=CPU):
    rows = sum(filled) if filled else lead[0]
    counts = torch.tensor(filled, dtype=torch.int32, device=bench.device) if filled else None
    for fmt, group, scale_bytes, rule in (("fp8_block", 128, 4, "fp32"), ("mxfp8", 32, 1, "rceil")):

        def data(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            return torch.randn(*lead, 2 * inner, device=bench.device, generator=g).to(dtype)

        def make(copy: int):
            x = data(copy)
            return lambda: silu_mul_quantize(x, fmt, counts=counts)

        def taken(t: torch.Tensor):
            """The filled rows."""
            if filled is None:
                return t
            return t[:rows] if len(lead) == 1 else torch.cat([t[e, :n] for e, n in enumerate(filled)])

        def check(out):
            bits, scale = silu_mul_quantize_ref(data(0), None, fmt, "row_major", rule, "silu", 1.0, math.inf, 0.0, False)
            moved = float((taken(out.data.view(torch.uint8)) != taken(bits)).float().mean())
            off = float((taken(out.scale).float() / taken(scale).float() - 1).nan_to_num().abs().max())
            return None if moved <= 2e-4 and off <= 4e-7 else f"{moved:.2g} of the elements and scales by up to {off:.2g} differ from the reference"

        bench.case(
            f"{'x'.join(map(str, lead))} filled={rows} I={inner} {str(dtype).removeprefix('torch.')} {fmt}",
            {"triton": make},
            check=check,
            nbytes=rows * inner * (2 * dtype.itemsize + 1 + scale_bytes / group),
            format=fmt,
        )
bench.exit()
