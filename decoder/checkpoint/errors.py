"""The one exception of this package: what is wrong, what was wanted, what was found, what to do."""


class CheckpointError(ValueError):
  """A checkpoint that cannot be found, read, converted or trusted. The message is one line for a user."""

  def __init__(self, what: str, *, wanted: object = None, got: object = None, remedy: str = ""):
    found = [f"{label} {value}" for label, value in (("wanted", wanted), ("got", got)) if value is not None]
    message = f"{what}: {', '.join(found)}" if found else what
    super().__init__(" ".join(f"{message}; {remedy}".split() if remedy else message.split()))
