"""What the benchmarks are made of: who is measured, and how."""
