"""`python -m moe_ops` is the command line."""

import sys

from moe_ops.cli import main

sys.exit(main())
