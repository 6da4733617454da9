"""What a captured MoE layer launches: every kernel of a replay with its time, and the tensor-core instructions of the GEMMs.

    python benchmarks/layer/profile_layer.py [--out DIR] [--commit ID]

Fails when a kernel of somebody else appears (an ATen sort, top-k, index, copy or GEMM), when there are more than eight launches, or when a
quantized GEMM's machine code holds no QGMMA (8-bit) instruction or holds an HGMMA (16-bit) one.
"""

import argparse
import collections
import json
import re
import sys
from pathlib import Path

import torch

from moe_ops import MoELayer
from moe_ops.bench.provenance import device_folder, provenance

EXPERTS, TOP_K, HIDDEN, INTER = 16, 8, 4096, 1536  # one rank of eight of Qwen3-235B, router over its own experts


def make_layer(fmt: str) -> MoELayer:
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", generator=g) * shape[-1] ** -0.5).to(torch.bfloat16)

    layer = MoELayer.from_weights(
        normal(EXPERTS, HIDDEN), normal(EXPERTS, 2 * INTER, HIDDEN), normal(EXPERTS, HIDDEN, INTER), top_k=TOP_K, format=fmt, renormalize=True
    )
    return layer.prepare()


def profile(layer: MoELayer, tokens: int) -> list[tuple[str, float]]:
    """(kernel, microseconds) of one graph replay, in order."""
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x)
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        graph.replay()
        torch.cuda.synchronize()
    events = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, round(e.device_time, 2)) for e in sorted(events, key=lambda e: e.time_range.start)]


def tensor_core_instructions() -> dict[str, dict[str, int]]:
    """QGMMA / HGMMA / HMMA counts in the machine code of each compiled GEMM kernel of this process."""
    from moe_ops.gemm.grouped_hopper import _grouped_gemm_hopper_kernel
    from moe_ops.gemm.grouped_kernel import _grouped_gemm_kernel
    from moe_ops.gemm.grouped_stream import _grouped_gemm_stream_kernel

    found = {}
    for kernel in (_grouped_gemm_kernel, _grouped_gemm_hopper_kernel, _grouped_gemm_stream_kernel):
        for i, compiled in enumerate(kernel.device_caches[torch.cuda.current_device()][0].values()):
            ptx = compiled.asm["ptx"]
            counts = collections.Counter(re.findall(r"\b(QGMMA|HGMMA|HMMA|QMMA)\b", compiled.asm["sass"]))
            operands = "e4m3" if "e4m3.e4m3" in ptx else "16 bits"
            found[f"{kernel.fn.__name__} #{i} ({operands})"] = dict(counts)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=f"benchmarks/results/{device_folder()}")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    rows, failures = [], []
    for fmt in ("fp8_block", "mxfp8"):
        layer = make_layer(fmt)
        for tokens in (1, 64, 1024):
            launches = profile(layer, tokens)
            print(f"{fmt} T={tokens}: {len(launches)} launches, {sum(t for _, t in launches):.1f} us")
            for name, time in launches:
                print(f"    {time:8.2f} us  {name}")
            rows.append({"format": fmt, "tokens": tokens, "launches": [{"kernel": n, "us": t} for n, t in launches]})
            foreign = [n for n, _ in launches if not re.fullmatch(r"_\w+_kernel", n)]
            if foreign:
                failures.append(f"{fmt} T={tokens}: kernels of others: {foreign}")
            if len(launches) > 8:
                failures.append(f"{fmt} T={tokens}: {len(launches)} launches")
    code = tensor_core_instructions()
    for name, counts in code.items():
        print(f"{name}: {counts}")
        if "e4m3" in name and (not counts.get("QGMMA") or counts.get("HGMMA")):
            failures.append(f"{name}: {counts}")
    path = Path(args.out, "profile_layer.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    layer_text = f"{EXPERTS} experts, top-{TOP_K}, H {HIDDEN}, I {INTER}; router logits and routing included"
    path.write_text(json.dumps({**provenance(args.commit), "layer": layer_text, "rows": rows, "tensor_core_instructions": code}, indent=1) + "\n")
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
