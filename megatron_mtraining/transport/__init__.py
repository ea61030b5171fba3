"""HOW ranks talk: one interface over process groups and over threads. The only importer of torch.distributed."""
