"""Networks: encoders, memory, heads and observation normalisation."""
