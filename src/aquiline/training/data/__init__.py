"""From conversations to training sets."""
