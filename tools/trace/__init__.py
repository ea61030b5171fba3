"""Time of a training step on a GPU, read off a torch profiler trace."""
