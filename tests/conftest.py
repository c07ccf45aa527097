"""Settings that all tests share."""

import torch

# Test processes run side by side; threads of one would only get in the way of the others.
torch.set_num_threads(1)
