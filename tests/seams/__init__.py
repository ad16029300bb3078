"""Tests of the seams between packages: what every part must keep to."""
