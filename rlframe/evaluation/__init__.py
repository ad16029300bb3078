"""Evaluation: an agent's episodes beside training, or a function of the user's; films, reports, and when it is due."""

from rlframe.evaluation.evaluator import EvalConfig, Evaluator

__all__ = ["EvalConfig", "Evaluator"]
