"""The parts of ``train_tiny_gpt.py``: text, model, training steps, what is observed, and pictures of it."""

import os
import warnings

# Megatron-Core warns of each optional package that it does not find; none is needed here.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
# Nothing is compiled here, and without its compiler torch starts in two seconds less on each rank.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
