"""Every transform again, in plain NumPy and float64, by sorting and by loops: slow, and plain to read.

`apply(name, numbers, logits, row)` gives the logits a transform leaves. Filters decide by comparing numbers that
float32 knows only so well; `bounds` gives what must and what may be kept when each such number is a little off.
"""

import collections
import math
from typing import NamedTuple

import numpy as np

OFF = 3e-6  # how far float32 may be off a decision, relative


class Row(NamedTuple):
  """What a row has seen: its tokens, how many are the prompt's, ids that end it, the length at which it ends."""

  tokens: tuple[int, ...] = ()
  prompt: int = 0
  ends: tuple[int, ...] = ()
  limit: int = 10**6


NOTHING = Row()


def law(x):
  """Probabilities of float64 logits."""
  weight = np.exp(x - x.max())
  return weight / weight.sum()


def entropy(p):
  return -sum(q * math.log(q) for q in p if q > 0)


def scoped(row, scope):
  if scope == "all":
    return row.tokens
  return row.tokens[row.prompt :] if scope == "output" else row.tokens[-scope:]


def repetition(x, row, value, scope="all"):
  for token in set(scoped(row, scope)):
    x[token] = x[token] * value if x[token] < 0 else x[token] / value
  return x


def presence(x, row, value, scope="output"):
  for token in set(scoped(row, scope)):
    x[token] -= value
  return x


def frequency(x, row, value, scope="output"):
  for token, number in collections.Counter(scoped(row, scope)).items():
    x[token] -= value * number
  return x


def dry(x, row, multiplier, base=1.75, allowed=2, scope="all", breakers=()):
  said = scoped(row, scope)
  longest = collections.defaultdict(int)
  for at, token in enumerate(said):
    number = 0
    while number < at and said[at - 1 - number] == said[len(said) - 1 - number]:
      if said[at - 1 - number] in breakers:
        break
      number += 1
    longest[token] = max(longest[token], number)
  for token, number in longest.items():
    if number >= allowed:
      x[token] -= multiplier * base ** (number - allowed)
  return x


def no_repeat_ngram(x, row, size):
  grams = {row.tokens[i : i + size] for i in range(len(row.tokens) - size + 1)}
  for token in range(len(x)):
    if size and len(row.tokens) >= size - 1 and (*row.tokens[len(row.tokens) - size + 1 :], token) in grams:
      x[token] = -np.inf
  return x


def sequence_bias(x, row, bias):
  for sequence, number in bias.items():
    before = tuple(sequence[:-1])
    if row.tokens[len(row.tokens) - len(before) :] == before:
      x[sequence[-1]] += number
  return x


def bad_words(x, row, words, scope="all"):
  said = row._replace(tokens=tuple(scoped(row, scope)))
  return sequence_bias(x, said, {tuple(word): -np.inf for word in words})


def logit_bias(x, row, bias):
  return sequence_bias(x, row, {(token,): number for token, number in bias.items()})


def allowed_tokens(x, row, ids):
  return np.where(np.isin(np.arange(len(x)), ids), x, -np.inf)


def suppress(x, row, ids):
  x[list(ids)] = -np.inf
  return x


def begin_suppress(x, row, ids):
  return suppress(x, row, ids) if len(row.tokens) == row.prompt else x


def min_new_tokens(x, row, number):
  return suppress(x, row, row.ends) if len(row.tokens) - row.prompt < number else x


def _forced(x, token):
  return np.where(np.arange(len(x)) == token, 0.0, -np.inf)


def forced_bos(x, row, token):
  return _forced(x, token) if len(row.tokens) == row.prompt else x


def forced_eos(x, row, token):
  return _forced(x, token) if len(row.tokens) == row.limit - 1 else x


def length_decay(x, row, start, factor):
  excess = len(row.tokens) - row.prompt - start
  for token in row.ends:
    if excess > 0 and x[token] > -np.inf:
      x[token] += abs(x[token]) * (factor**excess - 1)
  return x


def temperature(x, row, value):
  if value == 0:
    return _only(x, [int(np.argmax(x))])
  return (x - x.max()) / value


def dynamic_temperature(x, row, value, spread, exponent=1.0):
  number = int((x > -np.inf).sum())
  share = entropy(law(x)) / math.log(number) if number > 1 else 0.0
  low = max(0.0, value - spread)
  return temperature(x, row, low + (value + spread - low) * share**exponent)


def _only(x, ids):
  return np.where(np.isin(np.arange(len(x)), ids), x, -np.inf)


def _ordered(x):
  """Ids that are possible: most probable first, then lowest id."""
  return [i for i in sorted(range(len(x)), key=lambda i: (-x[i], i)) if x[i] > -np.inf]


def top_k(x, row, k):
  return _only(x, _ordered(x)[:k]) if k > 0 else x


def _head(x, order, p, beyond=False):
  """The shortest start of an order whose mass reaches, or passes, p."""
  mass, probability = 0.0, law(x)
  for number, token in enumerate(order, 1):
    mass += probability[token]
    if mass > p if beyond else mass >= p:
      return _only(x, order[:number])
  return _only(x, order)


def top_p(x, row, p):
  return _head(x, _ordered(x), p)


def min_p(x, row, p):
  probability = law(x)
  return np.where(probability >= p * probability.max(), x, -np.inf)


def _typical_order(x):
  probability = law(x)
  goal = entropy(probability)
  off = {i: abs(-math.log(probability[i]) - goal) for i in range(len(x)) if probability[i] > 0}
  return sorted(off, key=lambda i: (round(off[i], 9), i)), off


def typical(x, row, p):
  return _head(x, _typical_order(x)[0], p)


def epsilon(x, row, value):
  return np.where((law(x) >= value) | (x == x.max()), x, -np.inf)


def eta(x, row, value):
  probability = law(x)
  edge = min(value, math.sqrt(value) * math.exp(-entropy(probability)))
  return np.where((probability >= edge) | (x == x.max()), x, -np.inf)


def top_n_sigma(x, row, n):
  return np.where(x >= x.max() - n * np.std(x[x > -np.inf]), x, -np.inf)


def xtc(x, row, threshold):
  """Where it acts."""
  probability = law(x)
  strong = [i for i in _ordered(x) if probability[i] >= threshold]
  spared = min((i for i in strong if x[i] == x[strong[-1]]), default=None)
  return np.where(np.isin(np.arange(len(x)), [i for i in strong if i != spared]), -np.inf, x)


def mirostat(x, row, most):
  """most: bits of surprise."""
  probability = law(x)
  return np.where((-np.log2(np.maximum(probability, 1e-300)) <= most) | (x == x.max()), x, -np.inf)


# Other libraries' rules.


def top_k_with_ties(x, row, k):
  return np.where(x >= x[top_k(x, row, k) > -np.inf].min(), x, -np.inf)


def top_p_from_below(x, row, p):
  """transformers and vLLM, as they write it: ascending, what is removed has a mass ≤ 1 − p; the last one stays."""
  order = sorted(range(len(x)), key=lambda i: x[i])
  mass = np.cumsum(law(x)[order])
  return _only(x, [order[-1], *(token for token, so_far in zip(order, mass) if so_far > 1 - p)])


def top_p_with_ties(x, row, p):
  return x if p == 0 else np.where(x >= x[top_p(x, row, p) > -np.inf].min(), x, -np.inf)


def typical_with_ties(x, row, p):
  order, off = _typical_order(x)
  edge = max(off[i] for i in order if _head(x, order, p)[i] > -np.inf)
  return _only(x, [i for i in order if off[i] <= edge + 1e-9])


def typical_beyond(x, row, p):
  return _head(x, _typical_order(x)[0], p, beyond=True)


def apply(name, numbers, logits, row=NOTHING):
  """The logits that the transform leaves."""
  numbers = [float(np.float32(n)) if isinstance(n, float) else n for n in numbers]
  return globals()[name](np.asarray(logits, np.float32).astype(np.float64), row, *numbers)


def kept(name, numbers, logits, row=NOTHING):
  return set(np.nonzero(apply(name, numbers, logits, row) > -np.inf)[0].tolist())


def bounds(name, number, logits):
  """(must keep, may keep) for a filter of one number."""
  if isinstance(number, int):
    exact = kept(name, (number,), logits)
    return exact, exact
  off_by = (-OFF, -OFF / 2, 0.0, OFF / 2, OFF)
  nearby = [
    kept(name, (min(number * (1 + off), 1.0) if number <= 1 else number * (1 + off),), logits) for off in off_by
  ]
  must, may = set.intersection(*nearby), set.union(*nearby)
  if name.startswith("typical"):  # equally far from the entropy, on different sides of it: float32 cannot tell
    off = _typical_order(np.asarray(logits, np.float64))[1]
    edges = {off[token] for token in may if token not in must} | {max(off[token] for token in may)}
    alike = {token for token in off if min(abs(off[token] - edge) for edge in edges) < 3e-5 * (1 + off[token])}
    tied = len({float(logits[token]) for token in alike}) == 1
    must, may = (must, may) if tied else (must - alike, may | alike)
  return must, may


def draw_logits(seed, size, kind):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=size) * rng.choice([0.01, 1, 5, 30])
  if kind == "ties":
    x = np.round(x * 2) / 2
  elif kind == "flat":
    x = np.full(size, 3.0)
  elif kind == "masked":
    x[rng.random(size) < 0.7] = -np.inf
    x[rng.integers(size)] = 1.0
  return x.astype(np.float32)
