"""Comparison of the MTraining paper on the GPUs present: all its systems on one ring, and how even they are."""
