"""Samplers fill [T, B] batches by stepping environments with an agent; the evaluator scores one."""

from rlframe.samplers.background import RemoteSampler, SamplerProcess
from rlframe.samplers.base import Sampler
from rlframe.samplers.cpu import CpuSampler
from rlframe.samplers.evaluator import EvalConfig, Evaluator
from rlframe.samplers.gpu import GpuSampler
from rlframe.samplers.serial import SerialSampler

__all__ = [
    "CpuSampler",
    "EvalConfig",
    "Evaluator",
    "GpuSampler",
    "RemoteSampler",
    "Sampler",
    "SamplerProcess",
    "SerialSampler",
]
