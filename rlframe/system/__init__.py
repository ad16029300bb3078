"""The machine: memory, threads, processes; knows no RL."""
