"""Commands of ``mtraining`` that need no training script: ``launch/cli.py`` names them."""
