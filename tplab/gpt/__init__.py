"""Chapter 10: a transformer layer on p ranks, a whole GPT, and the text it writes.

transformer    ParallelTransformerLayer: attention and MLP with norms, dropout and residuals around them
model          ParallelGPT, from token ids to the loss
generation     choose the next token from logits that are sharded over the ranks
hugging_face   convert GPT-2, Llama, Qwen2 and Mistral checkpoints from and to Hugging Face's parameter names
hugging_face_config    convert their config.json to a GPTConfig
hugging_face_folder    load their safetensors files, of which each rank reads only its own slices
"""

from tplab.gpt.generation import candidates, generate
from tplab.gpt.hugging_face import from_hugging_face, gpt_config, to_hugging_face
from tplab.gpt.hugging_face_folder import config_of_folder, load_folder
from tplab.gpt.model import ParallelGPT
from tplab.gpt.transformer import ParallelTransformerLayer

__all__ = [
    "ParallelGPT",
    "ParallelTransformerLayer",
    "candidates",
    "config_of_folder",
    "from_hugging_face",
    "generate",
    "gpt_config",
    "load_folder",
    "to_hugging_face",
]
