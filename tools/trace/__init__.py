"""Where the time of a training step goes on a GPU, read off a torch profiler trace."""
