"""What benchmarks/sampling.py is made of: who is measured, and how."""
