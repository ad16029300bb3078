"""Speed, of parts against their limits and of whole trainings against other frameworks: python -m benchmarks.NAME."""
