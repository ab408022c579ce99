"""The models that the capstone compares with its own.

plain_gpt        the same GPT in plain PyTorch, on a single process
dtensor_gpt      the plain GPT on torch's own tensor parallelism
training_hooks   the parts of a training step that differ between models
"""
