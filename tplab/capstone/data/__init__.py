"""The training text, from files on disk to each step's batch.

corpus      text to train on
tokenizer   a byte-pair tokenizer, trained on this text
prepare     token files, which are created once and shared by ranks and runs
batches     the batch of a step, which depends only on the step's number
"""
