"""Run directories: logs, metrics and snapshots."""
