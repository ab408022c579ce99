"""The models that the capstone compares with its own.

plain_gpt        the same GPT in plain PyTorch, on one process
dtensor_gpt      the plain GPT on torch's own tensor parallelism
training_hooks   what a training step has to do differently for each of them
"""
