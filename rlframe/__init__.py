"""rlframe: deep-RL research on one machine: a Runner drives a Sampler, an Agent and an Algorithm over [T, B]."""

__version__ = "0.1.0"
