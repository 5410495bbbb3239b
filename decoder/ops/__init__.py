"""Pure array functions (floor 1)."""
