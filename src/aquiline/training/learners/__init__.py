"""One learner for each method that the training loop trains."""
