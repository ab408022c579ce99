"""The models that the capstone compares with its GPT.

plain_gpt        the same GPT in plain PyTorch, in a single process
dtensor_gpt      the plain GPT with PyTorch's built-in tensor parallelism
training_hooks   the parts of a training step that differ between models
"""
