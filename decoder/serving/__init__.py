"""Serving: rows on their way from prompt to last token, in one process or several (floor 5)."""
