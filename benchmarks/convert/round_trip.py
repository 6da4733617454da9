"""Checkpoints of four families, written by Transformers with random weights, through the converter and back: the error of the logits.

    python benchmarks/convert/round_trip.py

"weights" is the error with the result's weights and 16-bit products, as Transformers computes on a CPU; "experts run quantized" is that of
`moe_ops.hf.load_quantized`, which also quantizes the activations of the experts. Both against the bf16 checkpoint. Random weights average
nothing out: errors of trained models are smaller. Writes round_trip.json to benchmarks/results/<device>; needs the extra [hf].
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from moe_ops.bench.provenance import device_folder, provenance
from moe_ops.convert import convert, verify
from moe_ops.core.numerics import relative_error
from moe_ops.hf import load_quantized
from moe_ops.hf.small import FAMILIES, VOCAB, build

TOKENS = (4, 64)


def logits(model):
    ids = torch.randint(1, VOCAB, TOKENS, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits.float()


def from_pretrained(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.set_experts_implementation("eager")
    return model.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results") / device_folder(), help="folder of the JSON")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    rows = []
    print(f"{'family':12} {'format':10} {'bytes':>13} {'SQNR dB':>8} {'weights':>8} {'experts run quantized':>22} {'same token':>11}")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            build(family).save_pretrained(source, max_shard_size="4MB")
            plain = logits(from_pretrained(source))
            for fmt in ("mxfp8", "fp8_block"):
                out = Path(folder) / fmt
                report = convert(source, out, format=fmt, progress=False)
                assert verify(out, against=source).ok
                ours = logits(load_quantized(out))
                # Transformers' FP8 experts have no biases
                weights = None if family == "gpt-oss" else relative_error(logits(from_pretrained(out)), plain)
                row = {
                    "family": family,
                    "format": fmt,
                    "bytes_in": report.bytes_in,
                    "bytes_out": report.bytes_out,
                    "sqnr_db": round(report.overall().sqnr_db, 3),
                    "weights": None if weights is None else round(weights, 5),
                    "experts_run_quantized": round(relative_error(ours, plain), 5),
                    "same_token": round(float((ours.argmax(-1) == plain.argmax(-1)).float().mean()), 4),
                }
                rows.append(row)
                ratio, alone = f"{report.bytes_out / report.bytes_in:.3f} of bf16", "" if weights is None else f"{weights:.4f}"
                print(f"{family:12} {fmt:10} {ratio:>13} {row['sqnr_db']:8.2f} {alone:>8} {row['experts_run_quantized']:22.4f}", end=" ")
                print(f"{row['same_token']:11.3f}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "round_trip.json").write_text(json.dumps({**provenance(args.commit), "tokens": list(TOKENS), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
