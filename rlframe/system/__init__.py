"""Processes, shared memory, CPUs and signals. Contains no reinforcement learning."""
