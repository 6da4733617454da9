"""The commands `moe-ops convert`, `verify` and `inspect`: data on stdout, progress and errors on stderr.

Exit status: 0 good, 1 an error or a bad result, 2 wrong usage (what the arguments alone show to be wrong), 130 interrupted.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from moe_ops.convert.families import Patterns
from moe_ops.convert.source import ConvertError
from moe_ops.convert.types import LAYOUTS, Options


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in JSON too, where they ask for it."""

    json = False

    def error(self, message: str) -> NoReturn:
        if self.json:
            _print_failure(f"{self.prog.removeprefix('moe-ops ')}: {message}")
        super().error(message)

    def device(self, name: str) -> None:
        """Refuse a device that is none; one that is not there is no wrong usage."""
        if not re.fullmatch(r"(cpu|cuda)(:\d+)?", name):
            self.error(f"--device must be cpu, cuda or cuda:N, got {name!r}")


def _print_failure(message: str) -> None:
    print(json.dumps({"ok": False, "message": message}))


def _parser(command: str, description: str, argv: Sequence[str] | None) -> _Parser:
    parser = _Parser(prog=f"moe-ops {command}", description=description)
    parser.json = "--json" in (sys.argv[1:] if argv is None else argv)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines; its `ok` says whether all is good")
    return parser


def _run(command: str, args: argparse.Namespace, work: Callable[[], tuple[dict[str, Any], str, bool]]) -> int:
    """Run a command that gives (JSON, text, good), and print."""
    try:
        content, text, good = work()
    except (ConvertError, ValueError, TypeError, OSError) as error:
        # whoever asks for `verify` has no `convert` that failed
        message = f"{command}: {re.sub('^(convert|verify): ', '', str(error))}"
        if args.json:
            _print_failure(message)
        print(f"moe-ops: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"moe-ops: {command}: interrupted{'; the same command goes on from here' if command == 'convert' else ''}", file=sys.stderr)
        return 130
    print(json.dumps({"ok": good, **content}, indent=1) if args.json else text)
    return 0 if good else 1


def convert_main(argv: Sequence[str] | None = None) -> int:
    """Run `moe-ops convert` and return its exit status."""
    parser = _parser("convert", "Convert a checkpoint to MXFP8 or FP8 blocks, in bounded memory; a run that was killed goes on where it was.", argv)
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
    parser.device(args.device)
    try:
        options = Options(args.format, args.layout, args.rounding, args.stochastic, args.include, args.exclude, args.only, args.device)
        for what in ("include", "exclude"):
            Patterns(what, getattr(options, what))
    except (ValueError, TypeError) as error:
        parser.error(str(error).removeprefix("convert: "))

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
    parser = _parser("verify", "Check a quantized checkpoint, every byte of it; with --against, convert the source again and compare.", argv)
    parser.add_argument("dst", help="folder of the result")
    parser.add_argument("--against", metavar="SRC", help="the source that it was made from")
    parser.add_argument("--device", default="cpu", help="where the source is converted again")
    args = parser.parse_args(argv)
    parser.device(args.device)

    def work() -> tuple[dict[str, Any], str, bool]:
        from moe_ops.convert.verification import verify

        found = verify(args.dst, against=args.against, device=args.device)
        return found.as_json(), found.text(), found.ok

    return _run("verify", args, work)


def inspect_main(argv: Sequence[str] | None = None) -> int:
    """Run `moe-ops inspect` and return its exit status."""
    parser = _parser("inspect", "Describe a checkpoint from its headers: dialect, sizes, and every kind of tensor.", argv)
    parser.add_argument("path", help="Hugging Face folder, safetensors file, or hub id")
    args = parser.parse_args(argv)

    def work() -> tuple[dict[str, Any], str, bool]:
        from moe_ops.convert.inspection import inspect, text_of

        found = inspect(args.path)
        return found, text_of(found), found["problem"] is None

    return _run("inspect", args, work)
