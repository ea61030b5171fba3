"""Launcher of unchanged Megatron-LM training scripts with this attention: ``--attention-backend mtraining``.

The command line is in ``cli``. A program that starts Megatron its own way calls ``hooks.install`` before it imports its
training script: that adds the choice, the flags and the hooks, and changes nothing until the choice is made. Importing
this package imports no Megatron, so that the command line can first put the script's folder on the path.
"""
