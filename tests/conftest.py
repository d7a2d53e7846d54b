"""Settings for all tests."""

import torch

# Tiny models gain nothing from threads, and on a busy machine spinning threads cost tenfold.
torch.set_num_threads(1)
