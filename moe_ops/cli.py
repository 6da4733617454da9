"""The command line: `moe-ops`, which is `python -m moe_ops` too."""

import argparse
import importlib
from collections.abc import Sequence

from moe_ops import __version__

#: command -> (module whose `main(argv)` runs it, one line for --help)
COMMANDS = {
    "demo": ("moe_ops.demo", "run small random Qwen3-MoE, DeepSeek-V3, Mixtral and gpt-oss models with quantized experts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: arguments, default `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(prog="moe-ops", description="Quantized Mixture-of-Experts ops for torch.")
    parser.add_argument("--version", action="version", version=f"moe-ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (_module, line) in COMMANDS.items():
        commands.add_parser(name, help=line, description=line, add_help=False)
    args, rest = parser.parse_known_args(argv)
    return importlib.import_module(COMMANDS[args.command][0]).main(rest)
