"""Training of draft heads: data, features, losses, the training loop."""
