"""A conversion at full size: its rate beside those of a cold read and a synced write on the same disk, its memory, and its rate per core.

    python benchmarks/convert/bench_convert.py --gb 8 --folder DIR [--device cuda]

makes a synthetic Qwen3-MoE checkpoint (experts of 2048 x 768, 128 a layer, a vocabulary of 151936) below DIR, measures, checks, and removes it
again. Rates are bytes of bf16 source a second, but for the write, which counts the bytes written. On a machine without a GPU and without --gb,
a small conversion is checked and nothing is timed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from moe_ops.bench.provenance import device_folder, provenance
from moe_ops.convert import verify
from moe_ops.convert.pieces import header_bytes
from moe_ops.convert.stream import cores
from moe_ops.convert.types import Output
from moe_ops.quant.weight import quantize_weight_ref
from moe_ops.quant.weight_cpu import WeightQuantizer

SHARD = 2 << 30
BLOCK = 16 << 20
EXPERTS = 128
#: Of `in_memory`; odd.
PROCESSES = 21


def tensors(gb: float) -> list[Output]:
    """Names and shapes of a Qwen3-MoE checkpoint of about this size."""
    h, i, per_layer = 2048, 768, EXPERTS * 3 * 2048 * 768 * 2
    vocab = 151936 if gb >= 4 else max(256, int(gb * 1e9 / 8 / h / 2) // 32 * 32)
    layers = max(1, round((gb * 1e9 - 2 * vocab * h * 2) / per_layer))
    experts = EXPERTS if gb >= 1 else max(1, int(gb * 1e9 * EXPERTS / per_layer / 2))
    out = [Output("model.embed_tokens.weight", "BF16", (vocab, h))]
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        out += [Output(f"{stem}.{n}.weight", "BF16", (h,)) for n in ("input_layernorm", "post_attention_layernorm")]
        out += [
            Output(f"{stem}.self_attn.{n}_proj.weight", "BF16", s) for n, s in (("q", (4096, h)), ("k", (512, h)), ("v", (512, h)), ("o", (h, 4096)))
        ]
        out.append(Output(f"{stem}.mlp.gate.weight", "BF16", (experts, h)))
        for e in range(experts):
            out += [Output(f"{stem}.mlp.experts.{e}.{n}_proj.weight", "BF16", s) for n, s in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i)))]
    return out + [Output("model.norm.weight", "BF16", (h,)), Output("lm_head.weight", "BF16", (vocab, h))]


def make(folder: Path, gb: float) -> int:
    """Write the checkpoint; its bytes."""
    folder.mkdir(parents=True)
    shards: list[list[Output]] = [[]]
    for t in tensors(gb):
        if shards[-1] and sum(o.nbytes for o in shards[-1]) + t.nbytes > SHARD:
            shards.append([])
        shards[-1].append(t)
    g = torch.Generator().manual_seed(0)
    # normal data, each 16 MiB of it on another scale; its start moves so that no two tensors are alike
    base = torch.cat([torch.randn(BLOCK // 2, generator=g).mul_(2.0 ** (-6 - b)).bfloat16() for b in range(4)]).view(torch.uint8).numpy()
    weight_map, total = {}, 0
    for n, shard in enumerate(shards, 1):
        name = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        with open(folder / name, "wb") as f:
            f.write(header_bytes(shard, {"format": "pt"})[0])
            for t in shard:
                left, at = t.nbytes, (total % 977) * 64
                while left:
                    part = base[at : at + left].data
                    f.write(part)
                    left, at = left - len(part), 0
                weight_map[t.name] = name
                total += t.nbytes
            f.flush()
            os.fsync(f.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    experts = sum(".layers.0.mlp.experts." in n for n in weight_map) // 3
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": experts, "hidden_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def forget(folder: Path) -> None:
    """Drop the files' pages from the system's cache."""
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def spread(work: Callable[[Path, int, int], None], paths: list[Path], sizes: list[int], threads: int) -> float:
    """Seconds to do `work` on all blocks of the files with so many threads."""
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda job: work(*job), [(p, at, min(BLOCK, s - at)) for p, s in zip(paths, sizes, strict=True) for at in range(0, s, BLOCK)]))
    return time.perf_counter() - started


def read_rate(folder: Path, threads: int) -> float:
    """Bytes a second of a cold read."""
    local = threading.local()

    def read(path: Path, at: int, n: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(BLOCK)
        fd = os.open(path, os.O_RDONLY)
        done = 0
        while done < n:
            done += os.preadv(fd, [memoryview(local.buffer)[done:n]], at + done)
        os.close(fd)

    paths = sorted(folder.glob("*.safetensors"))
    sizes = [p.stat().st_size for p in paths]
    forget(folder)
    return sum(sizes) / spread(read, paths, sizes, threads)


def write_rate(folder: Path, total: int, threads: int) -> float:
    """Bytes a second of a write that ends with a sync of every file."""
    folder.mkdir()
    sizes = [min(SHARD, total - at) for at in range(0, total, SHARD)]
    paths = [folder / f"{n}.bin" for n in range(len(sizes))]
    data = torch.randint(0, 256, (BLOCK,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy().data
    for path in paths:
        path.touch()

    def write(path: Path, at: int, n: int) -> None:
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, data[:n], at)
        os.close(fd)

    started = time.perf_counter()
    for path, size in zip(paths, sizes, strict=True):
        spread(write, [path], [size], threads)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    seconds = time.perf_counter() - started
    shutil.rmtree(folder)
    return total / seconds


def watch(process: subprocess.Popen) -> int:
    """Peak of anonymous resident memory until the process ends."""
    peak = 0
    while process.poll() is None:
        try:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
        except OSError:
            break
        time.sleep(0.02)
    return peak


def convert(source: Path, result: Path, device: str, *options: str, cpus: list[int] | None = None, keep: bool = False) -> dict:
    """One conversion in a process of its own: its report without the errors of single weights, and its peak of memory."""
    shutil.rmtree(result, ignore_errors=True)
    command = [sys.executable, "-m", "moe_ops", "convert", str(source), str(result), "--device", device, "--json", *options]
    with open(result.with_suffix(".log"), "w+") as out:
        process = subprocess.Popen(command, stdout=out, preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None)
        peak = watch(process)
        if process.wait():
            raise SystemExit(f"convert failed: {' '.join(command)}")
        out.seek(0)
        report = json.load(out)
    if not keep:
        shutil.rmtree(result)
    return {
        "seconds": report["seconds"],
        "cpu_seconds": report["cpu_seconds"],
        "rate": report["bytes_in"] / report["seconds"],
        "rate_per_cpu_second": report["bytes_in"] / report["cpu_seconds"],
        "rss_anon_peak": peak,
        "bytes_out": report["bytes_out"],
        "error": report["error"],
    }


def in_memory() -> dict:
    """Bytes of bf16 a second that one core quantizes from memory: the plain expression, and the converter's way with and without errors.

    The plain expression makes a dozen temporaries, and where the allocator of a process happens to put them makes its rate differ fourfold. So each
    is the median of processes, with the range beside it.
    """
    command = [sys.executable, __file__, "--in-memory"]
    runs = [json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(PROCESSES)]
    rates = {name: sorted(run[name] for run in runs) for name in runs[0]}
    return {name: found[PROCESSES // 2] for name, found in rates.items()} | {"ranges": {n: [r[0], r[-1]] for n, r in rates.items()}}


def in_this_process() -> dict:
    """The rates of `in_memory` in one process."""
    torch.set_num_threads(1)
    w = torch.randn(1024, 4096).bfloat16()
    out = {}
    for fmt, scale in (("mxfp8", torch.empty(1024, 128, dtype=torch.uint8)), ("fp8_block", torch.empty(8, 32))):
        data = torch.empty(w.shape, dtype=torch.uint8)
        fast, measured = WeightQuantizer(fmt), WeightQuantizer(fmt, measure=True)
        rule = fast.rule
        ways = {
            "plain": lambda: quantize_weight_ref(w, fmt, 1, rule, -1),
            "converter": lambda: fast(w, data, scale),
            "converter_with_errors": lambda: measured(w, data, scale),
        }
        for name, way in ways.items():
            way()
            times = []
            for _ in range(7):
                started = time.perf_counter()
                way()
                times.append(time.perf_counter() - started)
            out[f"{fmt}_{name}"] = w.nbytes / sorted(times)[3]
    return out


def measure(base: Path, gb: float, device: str, threads: int) -> dict:
    """All rates of one checkpoint."""
    source, result = base / "source", base / "result"
    total = make(source, gb)
    largest = max(t.nbytes for t in tensors(gb))
    reads = {n: read_rate(source, n) for n in (1, 8)}
    writes = {n: write_rate(base / "write", total, n) for n in (1, 8)}
    forget(source)
    options = ["--threads", str(threads)] if threads else []
    cold = convert(source, result, device, *options)
    row = {
        "device": device,
        "cores": cores(),
        "load": os.getloadavg()[0],
        "bytes": total,
        "largest_tensor": largest,
        "read_cold": max(reads.values()),
        "write_synced": max(writes.values()),
        "by_threads": {"read_cold": reads, "write_synced": writes},
        "convert_cold": cold,
        "share_of_slower": cold["rate"] / min(max(reads.values()), max(writes.values())),
        "memory_limit": 2 * 10**9 + 2 * largest,
    }
    if device != "cpu":
        forget(source)
        row["convert_cold_cpu"] = convert(source, result, "cpu")
    else:
        read_rate(source, 1)  # into the cache again
        row["convert_one_core_cached"] = convert(source, result, "cpu", "--threads", "2", cpus=[min(os.sched_getaffinity(0))])
        row["one_core_in_memory"] = in_memory()
    return row


def check(base: Path) -> str | None:
    """A small conversion must be whole and what its source gives; what is wrong, if anything is."""
    make(base / "source", 0.02)
    report = convert(base / "source", base / "result", "cpu", keep=True)
    found = verify(base / "result", against=base / "source", threads=2)
    if not found.ok or not found.compared or report["error"] is None:
        return found.text()
    return None


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write: the disk that is measured")
    parser.add_argument("--gb", type=float, default=8.0 if cuda else 0.0, help="size of the source")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="of the conversion")
    parser.add_argument("--commit", default="", help="commit to record where git cannot be asked")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument("--in-memory", action="store_true", help="print what one core quantizes from memory, in this process")
    args = parser.parse_args()
    if args.in_memory:
        print(json.dumps(in_this_process()))
        return
    base = args.folder.absolute() / f"bench_convert.{os.getpid()}"
    base.mkdir(parents=True)
    try:
        if not args.gb:
            wrong = check(base)
            print(wrong or "convert: right (no GPU here, no time)")
            sys.exit(1 if wrong else 0)
        row = {**provenance(args.commit), **measure(base, args.gb, args.device, args.threads)}
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(json.dumps(row, indent=1))
    path = args.out / device_folder() / "bench_convert.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row, indent=1) + "\n")
    if row["convert_cold"]["rss_anon_peak"] > row["memory_limit"]:
        sys.exit("more anonymous memory than 2 GB and twice the largest tensor")
    sys.exit(0)


if __name__ == "__main__":
    main()
