"""The commands `moe-ops convert`, `verify` and `inspect`: data on stdout, progress and errors on stderr.

Exit status: 0 good, 1 an error or a bad result, 2 wrong usage, 130 interrupted.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from moe_ops.convert.source import ConvertError
from moe_ops.convert.types import LAYOUTS


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"moe-ops {command}", description=description)
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    return parser


def _run(command: str, args: argparse.Namespace, work: Callable[[], tuple[dict[str, Any], str, bool]]) -> int:
    """Run a command that gives (JSON, text, good), and print."""
    try:
        content, text, good = work()
    except (ConvertError, ValueError, TypeError, OSError) as error:
        # whoever asks for `verify` has no `convert` that failed
        message = f"{command}: {re.sub('^(convert|verify): ', '', str(error))}"
        if args.json:
            print(json.dumps({"ok": False, "message": message}))
        print(f"moe-ops: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"moe-ops: {command}: interrupted{'; the same command goes on from here' if command == 'convert' else ''}", file=sys.stderr)
        return 130
    print(json.dumps(content, indent=1) if args.json else text)
    return 0 if good else 1


def convert_main(argv: Sequence[str] | None = None) -> int:
    """Run `moe-ops convert` and return its exit status."""
    parser = _parser("convert", "Convert a checkpoint to MXFP8 or FP8 blocks, in bounded memory; a run that was killed goes on where it was.")
    parser.add_argument("src", help="Hugging Face folder, safetensors file, or hub id")
    parser.add_argument("dst", help="folder of the result: new, empty, or left by an interrupted run of the same command")
    parser.add_argument("--format", choices=("mxfp8", "fp8_block"), default="mxfp8", help="default mxfp8")
    parser.add_argument("--layout", choices=LAYOUTS, default="hf", help="names, dtypes and config keys of the result; default hf")
    parser.add_argument("--rounding", help="rule of the scales: rceil (default), floor, even for mxfp8; fp32 (default), pow2 for fp8_block")
    parser.add_argument("--stochastic", type=int, metavar="SEED", help="round elements stochastically under this seed")
    parser.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="quantize only modules that match re:REGEX or a name; repeatable"
    )
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="keep modules that match; repeatable")
    parser.add_argument("--only", choices=("experts",), help="quantize routed experts and nothing else")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda; the bytes are the same")
    parser.add_argument("--threads", type=int, help="items worked on at once; default fits the machine")
    parser.add_argument("--dry-run", action="store_true", help="decide and check everything, write nothing")
    args = parser.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}")

    def work() -> tuple[dict[str, Any], str, bool]:
        from moe_ops.convert.conversion import convert

        report = convert(
            args.src,
            args.dst,
            format=args.format,
            layout=args.layout,
            rounding=args.rounding,
            stochastic=args.stochastic,
            include=args.include,
            exclude=args.exclude,
            only=args.only,
            device=args.device,
            dry_run=args.dry_run,
            threads=args.threads,
            progress=False if args.json else None,
        )
        return report.as_json(), report.text(), True

    return _run("convert", args, work)


def verify_main(argv: Sequence[str] | None = None) -> int:
    """Run `moe-ops verify` and return its exit status."""
    parser = _parser("verify", "Check a quantized checkpoint, every byte of it; with --against, convert the source again and compare.")
    parser.add_argument("dst", help="folder of the result")
    parser.add_argument("--against", metavar="SRC", help="the source that it was made from")
    parser.add_argument("--device", default="cpu", help="where the source is converted again")
    args = parser.parse_args(argv)

    def work() -> tuple[dict[str, Any], str, bool]:
        from moe_ops.convert.verification import verify

        found = verify(args.dst, against=args.against, device=args.device)
        return found.as_json(), found.text(), found.ok

    return _run("verify", args, work)


def inspect_main(argv: Sequence[str] | None = None) -> int:
    """Run `moe-ops inspect` and return its exit status."""
    parser = _parser("inspect", "Describe a checkpoint from its headers: dialect, sizes, and every kind of tensor.")
    parser.add_argument("path", help="Hugging Face folder, safetensors file, or hub id")
    args = parser.parse_args(argv)

    def work() -> tuple[dict[str, Any], str, bool]:
        from moe_ops.convert.inspection import inspect, text_of

        found = inspect(args.path)
        return found, text_of(found), found["problem"] is None

    return _run("inspect", args, work)
