"""Experiment trackers: a module each, imported only if a run names it in `loggers=`."""
