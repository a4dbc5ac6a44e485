"""`python -m vllm_ssd.cli`: the command without its console script."""

import sys

from vllm_ssd.cli import main

sys.exit(main())
