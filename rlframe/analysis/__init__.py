"""Analysis of run directories: learning curves over seeds."""
