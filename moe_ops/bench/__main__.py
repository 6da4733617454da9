"""`python -m moe_ops.bench --device` prints the folder name of this machine's results."""

import sys

from moe_ops.bench.provenance import device_folder

if "--device" in sys.argv[1:]:
    print(device_folder())
else:
    print(__doc__)
