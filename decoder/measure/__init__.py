"""Measuring instruments (floor 5)."""
