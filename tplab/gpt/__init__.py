"""Chapter 10: a transformer layer on p ranks, a whole GPT, and the text it writes.

transformer    ParallelTransformerLayer: attention and MLP with norms, dropout and residuals around them
model          ParallelGPT, from token ids to the loss
generation     choose the next token from logits that are sharded over the ranks
hugging_face   convert GPT-2 and Llama checkpoints from and to Hugging Face's parameter names
"""

from tplab.gpt.generation import candidates, generate
from tplab.gpt.hugging_face import from_hugging_face, gpt_config, to_hugging_face
from tplab.gpt.model import ParallelGPT
from tplab.gpt.transformer import ParallelTransformerLayer

__all__ = [
    "ParallelGPT",
    "ParallelTransformerLayer",
    "candidates",
    "from_hugging_face",
    "generate",
    "gpt_config",
    "to_hugging_face",
]
