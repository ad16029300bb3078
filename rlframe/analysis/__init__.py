"""From run directories to evidence: learning curves over seeds."""
