"""Dequantizer on weights and activations, to bf16."""

import torch

from moe_ops import dequantize, quantize, quantize_weight
from moe_ops.bench.harness import Bench
from moe_ops.core.formats import as_bytes
from moe_ops.quant.dequantize import dequantize_ref

GPU = [("weight", (16, 3072, 4096)), ("activation", (8192, 7168)), ("activation", (64, 7168))]
CPU = [("weight", (2, 192, 160)), ("activation", (5, 96))]

bench = Bench("dequantize")
for kind, shape in bench.sizes(gpu=GPU, cpu=CPU):
    for fmt in ("fp8_block", "mxfp8"):

        def data(copy: int):
            g = torch.Generator(bench.device).manual_seed(copy)
            x = torch.randn(*shape, device=bench.device, dtype=torch.bfloat16, generator=g)
            return quantize_weight(x, fmt) if kind == "weight" else quantize(x, fmt)

        def make(copy: int):
            q = data(copy)
            return lambda: dequantize(q, torch.bfloat16)

        def reference():
            q = data(0)
            return dequantize_ref(as_bytes(q.data), q.scale, fmt, q.block[0], q.segments, torch.bfloat16)

        q = data(0)
        nbytes = data(0).nbytes + 2 * data(0).data.numel()
        bench.case(f"{kind} {'x'.join(map(str, shape))} {fmt}", {"triton": make}, reference=reference, nbytes=nbytes, format=fmt)
bench.exit()
