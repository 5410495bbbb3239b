"""Kernels for one platform, each behind a function with an XLA reference of the same signature in `decoder.ops`.

On CPU they are C++ (`native/`), called through `jax.ffi` and built on first use (`build.py`). Which one runs is
settled when a program is lowered, by its target platform; where none fits, or none could be built, XLA's own code runs.
"""
