"""RAND-LM (rotary, without grouping) in float64 NumPy, every token from scratch: what log-probs are checked against."""

import numpy as np
from fixtures import CONFIG, rand_lm


def logits(ids):
  """float64 [T, V] after each of `ids`."""
  _, params = rand_lm()
  heads, theta = CONFIG["num_attention_heads"], 10000.0

  def weight(*path):
    node = params
    for name in path:
      node = node[name]
    return np.asarray(node["weight"], np.float64)

  def norm(x_TD, *path):
    return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight(*path)

  def rotate(x_TNH):
    half = x_TNH.shape[-1] // 2
    angle = np.arange(len(ids))[:, None, None] * theta ** -(np.arange(half) / half)
    a, b = x_TNH[..., :half], x_TNH[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

  def split(x_TD):
    return x_TD.reshape(len(ids), heads, -1)

  x_TD = weight("embed")[list(ids)]
  for layer in (f"layers_{i}" for i in range(CONFIG["num_hidden_layers"])):
    h_TD = norm(x_TD, layer, "attention_norm")
    q, k, v = (split(h_TD @ weight(layer, "attention", name).T) for name in "qkv")
    scores = np.einsum("qnh,knh->nqk", rotate(q), rotate(k)) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    seen = np.exp(scores - scores.max(-1, keepdims=True))
    seen /= seen.sum(-1, keepdims=True)
    x_TD = x_TD + np.einsum("nqk,knh->qnh", seen, v).reshape(len(ids), -1) @ weight(layer, "attention", "o").T
    h_TD = norm(x_TD, layer, "mlp_norm")
    gate, up = (h_TD @ weight(layer, "mlp", name).T for name in ("gate", "up"))
    x_TD = x_TD + (gate / (1 + np.exp(-gate)) * up) @ weight(layer, "mlp", "down").T
  return norm(x_TD, "norm") @ weight("head").T


def log_softmax(x):
  peak = x.max(-1, keepdims=True)
  return x - peak - np.log(np.exp(x - peak).sum(-1, keepdims=True))
