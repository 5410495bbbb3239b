"""A progress bar on stderr."""

import contextlib
from collections.abc import Callable, Iterator

Progress = Callable[[int], object]  # called with how much was just done


@contextlib.contextmanager
def progress_bar(total: int, what: str, shown: bool = True, unit: str = "B") -> Iterator[Progress]:
  """A function to call with what was done, in units of `total`. The bar appears after a second of work, and only on a
  terminal."""
  from tqdm import tqdm

  # disable=None is tqdm's word for "only if stderr is a terminal".
  hidden = None if shown else True
  with tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", delay=1.0, leave=False, disable=hidden) as bar:
    yield bar.update
