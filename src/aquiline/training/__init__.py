"""From conversations to a trained draft head: data, features, losses, the training loop."""
