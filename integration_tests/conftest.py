"""What holds for every integration test: one thread per process, since the ranks share the cores."""

import torch

torch.set_num_threads(1)
