"""A strategy whose every draw asks the host what may be drawn, from within one running program."""

from collections.abc import Callable

from decoder.ops.kernels import channel
from decoder.strategies.autoregressive import State, release
from decoder.types import Array, Emission, Params, Strategy


def asking(strategy: Strategy, number: Array, unpack: Callable[[Array], Array]) -> Strategy:
  """number: of an open `channel.Channel`. unpack: (masks_BW) -> allowed_BV.

  The host is told of the tokens before their forward pass, and answers with masks and the rows that it has ended.
  """

  def forward(params: Params, state: State) -> tuple[State, Array]:
    return strategy.forward(params, state.replace(tokens_BT=channel.tell(number, state.tokens_BT, state.finish_B)))

  def draw(state: State, logits_BV: Array) -> tuple[State, Emission]:
    masks_BW, ended_B = channel.ask(number, logits_BV)
    return strategy.draw(release(state, ended_B), logits_BV, unpack(masks_BW))

  return strategy._replace(forward=forward, draw=draw)
