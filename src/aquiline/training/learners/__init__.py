"""What the training loop trains: one learner for each method."""
