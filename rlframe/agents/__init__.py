"""Agents: what maps inputs and noise to actions, and rows of training data to what the loss needs."""
