"""Tests of exploration bonuses."""
