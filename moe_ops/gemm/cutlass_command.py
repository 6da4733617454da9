"""`moe-ops build cutlass`: make the CUTLASS kernels ahead of time."""

import argparse
import sys
from collections.abc import Sequence

from moe_ops.core.arch import parse_arch
from moe_ops.gemm import cutlass_build as build


def _arch(text: str) -> str:
    """The architecture as the libraries are named by it: the instructions of sm90a are what there is for sm90."""
    name = f"sm{parse_arch(text)}a"
    return name if name in build.ARCHS else text


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or say why not; 0 where every library asked for is there afterwards."""
    parser = argparse.ArgumentParser(
        prog="moe-ops build",
        description="Compile kernels ahead of time, on a machine with or without a GPU. A minute and 4 GB of memory each.",
        epilog=f"Needs nvcc and CUTLASS's headers ({build.INSTALL} --no-deps). Libraries go to MOE_OPS_CACHE, else ~/.cache/moe_ops; "
        "copied there, they serve machines that have neither.",
    )
    parser.add_argument("what", choices=("cutlass",), help="whose kernels")
    parser.add_argument("--arch", type=_arch, choices=(*build.ARCHS, "all"), default="all", help="architecture; sm90 is sm90a (default: all)")
    parser.add_argument("--jobs", type=int, metavar="N", help="kernels to compile at once, at most (default: by cores and memory)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be built, and stop")
    args = parser.parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    asked = [i for i in build.INSTANTIATIONS if args.arch in ("all", i.arch)]
    wanted = build.missing(asked)
    for instantiation in asked:
        sys.stdout.write(f"{instantiation.path}  {'to build' if instantiation in wanted else 'there'}\n")
    against = {arch: build.build_reason(arch) for arch in dict.fromkeys(i.arch for i in wanted)}
    for reason in dict.fromkeys(filter(None, against.values())):
        sys.stderr.write(f"moe-ops build: cannot build here: {reason}\n")
    failed = any(against.values())
    can = [i for i in wanted if against[i.arch] is None]  # an nvcc too old for one architecture serves the other
    if can and not args.dry_run:
        try:
            build.build(can, most=args.jobs)
        except build.BuildError as failure:
            sys.stderr.write(f"moe-ops build: {failure}\n")
            failed = True
    return int(failed)
