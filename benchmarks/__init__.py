"""Benchmarks of single parts and of whole trainings, against limits and other frameworks: python -m benchmarks.NAME."""
