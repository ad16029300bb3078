"""Runners: the training loops."""
