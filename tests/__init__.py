"""Tests mirror rlframe/. A package, so that worker processes of spawn and forkserver can import what tests define."""
