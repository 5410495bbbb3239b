"""Training of the small models that decoding needs: translators and drafts, with optax and Orbax (floor 4)."""
