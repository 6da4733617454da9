"""The command line: `moe-ops`, which is `python -m moe_ops` too."""

import argparse
import importlib
import os
from collections.abc import Sequence

from moe_ops import __version__

#: command -> (module and function of (argv) that runs it, one line for --help)
COMMANDS = {
    "convert": ("moe_ops.convert.command:convert_main", "convert a checkpoint to MXFP8 or FP8 blocks"),
    "verify": ("moe_ops.convert.command:verify_main", "check a converted checkpoint, every byte of it"),
    "inspect": ("moe_ops.convert.command:inspect_main", "describe a checkpoint from its headers"),
    "build": ("moe_ops.gemm.cutlass_command:main", "compile the CUTLASS kernels ahead of time"),
    "env": ("moe_ops.gemm.env:main", "versions, GPUs, caches, and which implementations can run here and why not"),
    "demo": ("moe_ops.demo:main", "run small random Qwen3-MoE, DeepSeek-V3, Mixtral and gpt-oss models with quantized experts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 141 where the reader of its output left, as `head` does.

    Args:
        argv: arguments, default `sys.argv[1:]`.
    """
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)  # here, where an error can still be caught
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes nowhere when the process ends
        return 141


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="moe-ops", description="Quantized Mixture-of-Experts ops for torch.")
    parser.add_argument("--version", action="version", version=f"moe-ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (_module, line) in COMMANDS.items():
        commands.add_parser(name, help=line, description=line, add_help=False)
    args, rest = parser.parse_known_args(argv)
    module, _, function = COMMANDS[args.command][0].partition(":")
    return getattr(importlib.import_module(module), function)(rest)
