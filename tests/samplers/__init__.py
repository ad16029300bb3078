"""Tests of samplers, and what other tests collect with."""
