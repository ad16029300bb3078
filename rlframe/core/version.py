"""The version of rlframe, for the package, its snapshots and its run directories."""

__version__ = "0.1.0"
