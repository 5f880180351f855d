"""Models that begin with the weights of somebody else."""
