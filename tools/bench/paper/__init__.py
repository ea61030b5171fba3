"""The MTraining paper's comparison on the GPUs present: all its systems on one ring, and how even they are."""
