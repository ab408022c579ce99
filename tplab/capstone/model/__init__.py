"""The models that the capstone compares with its GPT, and what a training step needs to know about a model."""
