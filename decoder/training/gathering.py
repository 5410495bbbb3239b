"""What a draft head learns from: texts that the model itself wrote, and its features of every token of them."""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from decoder.cache import Raw, allocate
from decoder.checkpoint.atomic import write_file
from decoder.checkpoint.progress import progress_bar
from decoder.models.registry import Network, feature_size
from decoder.sampling import chain, request_key, temperature, top_k
from decoder.strategies import Accompanied, Both, Companion, accompanied, autoregressive, init, pending, run
from decoder.types import NONE, Array

_FEW = 64  # tokens drawn from: a text by the whole vocabulary takes a noise for each id of it
_IDS, _SPANS, _FEATURES, _SO_FAR = "ids.npy", "spans.npy", "features.npy", "gathered.json"


class Texts(NamedTuple):
  """ids_NL, NONE after the end; spans_N2: where what the model wrote begins and ends; features_NLD, float16: the
  model's, of all tokens but the last one that it wrote."""

  ids_NL: np.ndarray
  spans_N2: np.ndarray
  features_NLD: np.ndarray


@struct.dataclass
class Recorded:
  """The features of all tokens that a model read, at their positions, float32: XLA on CPU writes shorter floats by way
  of a copy of everything."""

  features_BSD: Array

  def truncate(self, length_B: Array) -> "Recorded":
    return self  # what is forgotten will be written over

  def select(self, rows_R: Array) -> "Recorded":
    return Recorded(self.features_BSD[rows_R])

  def insert(self, rows_R: Array, other: "Recorded") -> "Recorded":
    return Recorded(self.features_BSD.at[rows_R].set(other.features_BSD, mode="drop"))


def recorder(size: int) -> Companion:
  """A companion that drafts nothing and keeps features, `size` floats a token."""

  def empty(rows: int, capacity: int) -> Recorded:
    return Recorded(jnp.zeros((rows, capacity, size), jnp.float32))

  def read(params: Any, tokens_BT: Array, positions_BT: Array, features_BTD: Array, memory: Recorded) -> Recorded:
    capacity = memory.features_BSD.shape[1]
    slots_BT = jnp.where(positions_BT >= 0, positions_BT, capacity)
    rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]
    kept = memory.features_BSD.at[rows_B1, slots_BT].set(features_BTD.astype(jnp.float32), mode="drop")
    return Recorded(kept)

  return Companion(empty, read, None)


def filled(templates: Sequence[str], topics: Sequence[str], seed: int) -> Iterator[str]:
  """Prompts without end: templates with a topic in the place of {topic}, no pair twice before all were used."""
  order = random.Random(seed)
  while True:
    for number in order.sample(range(len(templates) * len(topics)), len(templates) * len(topics)):
      yield templates[number // len(topics)].replace("{topic}", topics[number % len(topics)])


def gather(
  network: Network,
  params: Any,
  ends: Sequence[int],
  prompts: Iterator[Sequence[int]],
  out: Path,
  *,
  texts: int,
  length: int = 256,
  rows: int = 32,
  temperatures: Sequence[float] = (0.0, 0.8),
  seed: int = 0,
  progress: bool = True,
) -> Texts:
  """Has the model go on from prompts of ids and keeps what it wrote and felt in files of the directory `out`; what lies
  there is gone on with.

  texts: how many, a multiple of `rows`, which are written together. length: of a text in tokens, prompt included;
  longer prompts than a quarter of it are passed over. temperatures: taken in turn. ValueError for other numbers, and
  for a directory of another kind of texts.
  """
  if texts < rows or texts % rows or length < 32:
    raise ValueError(f"texts must be a multiple of rows, {rows}, and length at least 32, got {texts} and {length}")
  out = Path(out)
  out.mkdir(parents=True, exist_ok=True)
  batch = _batch(network, params, ends, rows, length)
  size = batch.size
  kept = _files(out, {"texts": texts, "length": length, "rows": rows, "seed": seed, "size": size})
  done = json.loads((out / _SO_FAR).read_text())
  chosen = _short(prompts, length // 4)
  start = time.perf_counter()
  with progress_bar(texts - done["texts_done"], "writing texts", progress, unit="text") as advance:
    for first in range(0, texts, rows):
      group = [next(chosen) for _ in range(rows)]
      if first < done["texts_done"]:  # in an earlier run
        continue
      warmth_B = np.resize(np.asarray(temperatures, np.float32), rows)
      written = batch.write(group, warmth_B, seed + first)
      for file, values in zip(kept, written):
        file[first : first + rows] = values
        file.flush()
      done["texts_done"], done["seconds"] = first + rows, done["seconds"] + time.perf_counter() - start
      start = time.perf_counter()
      write_file(out / _SO_FAR, json.dumps(done).encode())
      advance(rows)
  return kept


def _short(prompts: Iterator[Sequence[int]], most: int) -> Iterator[Sequence[int]]:
  """Prompts of at most so many tokens. ValueError where there are none among a thousand."""
  passed = 0
  for ids in prompts:
    if len(ids) <= most:
      passed = 0
      yield ids
    elif (passed := passed + 1) == 1000:
      raise ValueError(f"a thousand prompts in a row have more than {most} tokens; write longer texts, with length")


def read_texts(out: Path) -> Texts:
  """What `gather` left, as far as it came; features stay in their file."""
  done = json.loads((Path(out) / _SO_FAR).read_text())["texts_done"]
  return Texts(*(np.load(Path(out) / name, mmap_mode="r")[:done] for name in (_IDS, _SPANS, _FEATURES)))


def seconds(out: Path) -> float:
  """How long it took to write what lies in `out`."""
  return json.loads((Path(out) / _SO_FAR).read_text())["seconds"]


def _files(out: Path, form: dict[str, int]) -> Texts:
  names = (_IDS, _SPANS, _FEATURES)
  if (out / _SO_FAR).exists():
    before = json.loads((out / _SO_FAR).read_text())
    changed = [f"{name} {before.get(name)}, now {value}" for name, value in form.items() if before.get(name) != value]
    if changed:
      raise ValueError(f"{out} holds texts with {', '.join(changed)}; give another directory, or remove it")
    return Texts(*(np.load(out / name, mmap_mode="r+") for name in names))
  texts, length = form["texts"], form["length"]
  shapes = ((texts, length), np.int32), ((texts, 2), np.int32), ((texts, length, form["size"]), np.float16)
  files = [np.lib.format.open_memmap(out / n, "w+", dtype, shape) for n, (shape, dtype) in zip(names, shapes)]
  write_file(out / _SO_FAR, json.dumps({**form, "texts_done": 0, "seconds": 0.0}).encode())
  return Texts(*files)


class _Batch(NamedTuple):
  size: int
  write: Callable[[list[Sequence[int]], np.ndarray, int], Texts]


def _batch(network: Network, params: Any, ends: Sequence[int], rows: int, length: int) -> _Batch:
  """Programs that write `rows` texts at once."""
  size = feature_size(network, params)
  companion = recorder(size)
  strategy = autoregressive(
    accompanied(network.model, companion), chain(temperature(1.0), top_k(_FEW)), network.vocab_size
  )
  both, half = Both(params, None), length // 4

  def begin(fields: dict[str, Array]) -> Any:
    cache = allocate(network.cache_spec, rows, length, codec=Raw(network.dtype, bits=True))
    cache = Accompanied.around(cache, companion.allocate(rows, length))
    keys = jax.vmap(request_key)(fields.pop("seed_B"), jnp.zeros(rows, jnp.int32))
    return init(cache, key_B=keys, settings=(fields.pop("warmth_B"), jnp.full((rows,), _FEW, jnp.int32)), **fields)

  def read(both: Both, state: Any) -> Any:
    return strategy.step(both, pending(state, state.length_B - half, half))[0]

  def write_on(both: Both, state: Any) -> Any:
    return run(strategy, both, state, jnp.int32(length), length).state

  begin, read, write_on = jax.jit(begin), jax.jit(read, donate_argnums=1), jax.jit(write_on, donate_argnums=1)

  def write(prompts: list[Sequence[int]], warmth_B: np.ndarray, seed: int) -> Texts:
    context_BL = np.zeros((rows, length), np.int32)
    prompt_B = np.array([len(ids) for ids in prompts], np.int32)
    for row, ids in enumerate(prompts):
      context_BL[row, : len(ids)] = ids
    fields = {
      "context_BL": context_BL, "length_B": prompt_B, "limit_B": np.full(rows, length, np.int32),
      "ends_BE": np.tile(np.asarray([*ends] or [NONE], np.int32), (rows, 1)),
      "seed_B": (np.uint32(seed) + np.arange(rows, dtype=np.uint32)), "warmth_B": warmth_B,
    }  # fmt: skip
    state = write_on(both, read(both, begin(fields)))
    context_BL, end_B, features = jax.device_get((state.context_BL, state.length_B, state.cache.memory.features_BSD))
    there_BL = np.arange(length)[None] < end_B[:, None]
    ids_BL = np.where(there_BL, context_BL, NONE)
    features_BLD = np.where((np.arange(length)[None] < end_B[:, None] - 1)[..., None], features, np.float16(0))
    return Texts(ids_BL, np.stack([prompt_B, end_B], axis=1), features_BLD)

  return _Batch(size, write)
