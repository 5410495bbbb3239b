"""Networks as Flax Linen modules (floor 3)."""
