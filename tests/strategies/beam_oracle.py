"""What a beam search must find, in plain NumPy and lists, from `next_logprobs(text) -> log-probs of what may follow`.

`exhaustive` looks at every text there is; `search` is a beam search written down a second time, one text at a time,
with nothing shared with ours. Texts are tuples of new tokens; a hypothesis is (score, text, log-probs of its tokens).
"""

import math

import numpy as np


def penalty(length, alpha, gnmt=False):
  return ((5 + length) / 6) ** alpha if gnmt else length**alpha


def exhaustive(next_logprobs, ends, limit, alpha=1.0, gnmt=False, shortest=0):
  """All hypotheses of up to `limit` new tokens, the best first."""
  found = []

  def go(text, each):
    logp = next_logprobs(text)
    for token in np.flatnonzero(logp > -np.inf).tolist():
      longer, steps = (*text, token), (*each, float(logp[token]))
      if token in ends and len(longer) < shortest:
        continue
      if token in ends or len(longer) == limit:
        found.append((sum(steps) / penalty(len(longer), alpha, gnmt), longer, steps))
      else:
        go(longer, steps)

  go((), ())
  return sorted(found, key=lambda one: (-one[0], one[1]))


def search(next_logprobs, ends, limit, beams, alpha=1.0, gnmt=False, early=False, patience=1.0, groups=1,
           diversity=0.0, noise=None):  # fmt: skip
  """The hypotheses of a beam search, the best first, over all groups. early: True, False or 'never'.

  noise: (step, beam, token) -> what is added where candidates are drawn rather than the best.
  """
  size = beams // groups
  live = [[(0.0, (), ())] for _ in range(groups)]
  pools, counts, done = [[] for _ in range(groups)], [0] * groups, [False] * groups
  for step in range(1, limit + 1):
    taken = {}
    for g in range(groups):
      if done[g]:
        continue
      candidates = []
      for slot, (total, text, each) in enumerate(live[g]):
        logp = next_logprobs(text)
        for token in np.flatnonzero(logp > -np.inf).tolist():
          rank = total + logp[token] - diversity * taken.get(token, 0)
          rank += noise(step, g * size + slot, token) if noise else 0.0
          candidates.append((-rank, slot, token, (total + logp[token], (*text, token), (*each, float(logp[token])))))
      candidates.sort(key=lambda one: one[:3])
      for _, _, token, (total, text, each) in candidates[:size]:
        if token in ends or step == limit:
          counts[g] += 1
          pools[g].append((total / penalty(step, alpha, gnmt), text, each))
      pools[g] = sorted(pools[g], key=lambda one: -one[0])[:size]
      going = [(token, one) for _, _, token, one in candidates if token not in ends][:size]
      for token, _ in going:
        taken[token] = taken.get(token, 0) + 1
      live[g] = [one for _, one in going] if step < limit else []
      done[g] = not live[g] or _enough(pools[g], live[g], counts[g], size, step, limit, alpha, gnmt, early, patience)
    if all(done):
      break
  return sorted((one for pool in pools for one in pool), key=lambda one: -one[0])


def _enough(pool, live, count, size, step, limit, alpha, gnmt, early, patience):
  if early is True:
    return count >= patience * size
  worst = pool[size - 1][0] if len(pool) >= size else -math.inf
  best = max(total for total, _, _ in live)
  lengths = range(step + 1, limit + 1) if early == "never" else [step]
  return worst >= max(best / penalty(length, alpha, gnmt) for length in lengths)
