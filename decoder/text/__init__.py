"""Text in, ids out, and back: tokenizers, incremental detokenisation, chat templates and stop strings. No JAX."""

from decoder.text.chat import ChatTemplate
from decoder.text.dedent import Dedent
from decoder.text.detokenizer import Detokenizer
from decoder.text.infill import Infill
from decoder.text.stops import Stops
from decoder.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_files, tokenizer_from_gguf

__all__ = [
  "ChatTemplate",
  "Dedent",
  "Detokenizer",
  "Infill",
  "Stops",
  "Tokenizer",
  "load_tokenizer",
  "tokenizer_from_files",
  "tokenizer_from_gguf",
]
