"""Samplers fill [T, B] batches by stepping environments with an agent; the evaluator scores one."""
