"""The training text, from files on disk to the batch of a step.

corpus        the standard library's source code, or any folder of text
tokenizer     a byte-pair tokenizer, trained on that text
prepare       tokenizes the text once and shares the result between ranks and runs
token_files   token files on disk, verified before they are used
batches       the tokens that a step trains on, computed from the step number
"""
