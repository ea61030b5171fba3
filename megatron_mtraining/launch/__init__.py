"""Launcher of unchanged Megatron-LM training scripts with this attention: ``--attention-backend mtraining``.

The command line is in ``cli``. A program that starts Megatron its own way calls
:func:`megatron_mtraining.megatron.install` before it imports its training script. Importing this package imports no
Megatron, so that the command line can first put the script's folder on the path.
"""
