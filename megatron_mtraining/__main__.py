"""``python -m megatron_mtraining``: see ``launch/cli.py``."""

from .launch.cli import main

main()
