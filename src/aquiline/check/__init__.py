"""Checks a head beside its target: acceptance in training and in the engine, forecast, diagnosis, losslessness."""
