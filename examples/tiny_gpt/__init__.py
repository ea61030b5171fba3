"""The parts of ``train_tiny_gpt.py``: text, model, training steps, what is observed, and pictures of it."""

import warnings

# Megatron-Core warns of each optional package that it does not find; none is needed here.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
